"""What the engine decides (StepPlan) and what it is told back (StepResult)."""

from dataclasses import dataclass

import msgspec

from cygnet.base.ids import BlockId, RequestId
from cygnet.base.messages import PositionLogprobs
from cygnet.base.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner does not know: just admitted, or admitted again after a preemption."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """All tokens so far: prompt and, after a preemption, output."""
    num_prompt_tokens: int
    sampling: SamplingParams
    write_full_from: int
    """First position whose full-attention KV is written; what lies before is cached and only read."""
    key_floor: int
    """First position whose SWA KV may be read."""


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

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen after a request's last one."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a StepPlan: a token for every request with `sample`."""

    step: int
    sampled: dict[RequestId, SampledToken]
