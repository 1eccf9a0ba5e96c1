"""What the engine decides (StepPlan), what it is told back (StepResult), and who carries it out (StepRunner)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cygnet.base.ids import BlockId, RequestId
from cygnet.base.messages import PositionLogprobs
from cygnet.base.sampling import SamplingParams
from cygnet.engine.request import Request
from cygnet.kv.transfers import NO_TRANSFERS, StepTransfers


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner does not know: just admitted, or admitted again after a preemption."""

    request_id: RequestId
    token_ids: Sequence[int]
    """All tokens so far: prompt and, after a preemption, output."""
    num_prompt_tokens: int
    sampling: SamplingParams
    write_full_from: int
    """First position whose full-attention KV is written; what lies before is cached and only read."""
    key_floor: int
    """First position whose SWA KV may be read."""
    exact_from: int
    """First position whose SWA KV must be right: behind `key_floor` where a window is rebuilt, else the same."""


class ScheduledRequest(msgspec.Struct, frozen=True):
    """Run tokens `start : start + num_tokens` of a request. A struct, as one is made per request and step: a frozen
    dataclass takes four times as long to make."""

    request_id: RequestId
    start: int
    num_tokens: int
    full_offset: int
    """Block index of `new_full_blocks[0]`; the runner's table has all before."""
    new_full_blocks: tuple[BlockId, ...]
    swa_offset: int
    new_swa_blocks: tuple[BlockId, ...]
    sample: bool
    """Whether the last token's logits choose a next token: it is the sequence's last."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `gone` and `new` come first: rows to forget, rows to make."""

    step: int
    gone: tuple[RequestId, ...]
    new: tuple[NewRequest, ...]
    requests: tuple[ScheduledRequest, ...]
    freed_full: tuple[BlockId, ...] = ()
    """Blocks to poison before the pass (only when poisoning is on)."""
    freed_swa: tuple[BlockId, ...] = ()
    transfers: StepTransfers = NO_TRANSFERS
    """Copies between device and host that go with the pass. A plan may have these and no requests."""

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


class SampledToken(msgspec.Struct, frozen=True):
    """The token chosen after a request's last one. A struct for the reason above."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a StepPlan: a token for every request with `sample`. Others are not looked at."""

    step: int
    sampled: dict[RequestId, SampledToken]


class PendingStep(Protocol):
    """A step that was launched."""

    def done(self) -> bool:
        """Whether the device is through with it. Never waits."""

    def result(self) -> StepResult:
        """Wait for the device, and choose the tokens. To be called once; raises what the step failed with."""


class StepRunner(Protocol):
    """Carries out plans, one at a time: `launch`, then `result` of what it gave, then the next `launch`."""

    @property
    def asynchronous(self) -> bool:
        """Whether `launch` leaves the work to a device and comes back before it is done. If not, launching takes as
        long as the step, and its result is there at once."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start the step. Launching while another one is pending is an `InvariantError`."""

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId]) -> list[str]:
        """All discrepancies between what it keeps and the core's running requests; between steps only."""
