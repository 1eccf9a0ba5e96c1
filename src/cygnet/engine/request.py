"""A request as the engine keeps it."""

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from cygnet.base.ids import RequestId
from cygnet.base.sampling import SamplingParams
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.reuse import CachedTokens


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way. There is no prefill or decode mode: while `num_computed_tokens` is behind the tokens
    known, it catches up; when it has caught up, the next token is sampled.

        token_ids   prompt ............ | output ........ last
                    computed: KV exists ...............|      the last token's KV never exists before it has run
    """

    request_id: RequestId
    token_ids: MutableSequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    """`sampling.max_tokens`, cut to what the context length leaves."""
    arrival_ns: int
    sequence: int
    """Order of arrival; breaks ties of `arrival_ns`."""
    kv: RequestKV
    stop_ids: frozenset[int]
    running: bool = False
    admitted_ns: int | None = None
    """When it was first admitted; None before."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    """Effective hit at the first admission, by tier; nothing before."""
    num_sent_full: int = 0
    num_sent_swa: int = 0
    """Block-table entries the runner has."""
    finish_reason: str | None = field(default=None)

    @property
    def num_computed_tokens(self) -> int:
        return self.kv.num_computed

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to run before the next one can be sampled; at least 1."""
        return len(self.token_ids) - self.kv.num_computed

    @property
    def priority(self) -> tuple[int, int]:
        """Lower is older; older requests are never preempted for younger ones."""
        return self.arrival_ns, self.sequence
