"""What one HTTP request leaves behind: a log line and a count, never its text."""

import logging
from dataclasses import dataclass, field

from starlette.types import Scope

from cygnet.api.responses import PromptTokensDetails

log = logging.getLogger("cygnet.api.access")

_KEY = "cygnet.record"


@dataclass
class Record:
    """Grows while the request is served. `status` 499 in the log means that the client left first."""

    request_id: str
    method: str
    path: str
    started_ns: int
    status: int = 0
    route: str = "other"
    """The route's pattern, never a path that a client made up: metric labels must stay few."""
    prompt_tokens: int = 0
    cached: PromptTokensDetails = field(default_factory=lambda: PromptTokensDetails(0))
    completion_tokens: int = 0
    disconnected: bool = False
    failure: str = ""

    @property
    def final_status(self) -> int:
        """Status as logged and counted."""
        return 499 if self.disconnected else self.status or 500

    def line(self, now_ns: int) -> str:
        """The log line."""
        parts = [self.method, self.path, str(self.final_status), f"{(now_ns - self.started_ns) / 1e6:.1f}ms"]
        if self.prompt_tokens:
            parts += [f"prompt={self.prompt_tokens}", f"cached={self.cached.cached_tokens}"]
            if tiers := self.cached.cached_tokens_details:
                parts += [f"device={tiers.device}", f"host={tiers.host}", f"store={tiers.store}"]
            parts.append(f"completion={self.completion_tokens}")
        if self.failure:
            parts.append(f"error={self.failure}")
        return " ".join([*parts, f"id={self.request_id}"])


def attach(scope: Scope, record: Record) -> None:
    """Make `record` the request's record."""
    scope[_KEY] = record


def record_of(scope: Scope) -> Record:
    """The request's record."""
    record = scope[_KEY]
    assert isinstance(record, Record)
    return record
