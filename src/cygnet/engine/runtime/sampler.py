"""From logits to tokens.

Randomness is stateless: the uniform number behind output token `i` is a hash of (seed, i). So a seeded request gives
the same text whatever else is in the batch, and after a preemption, a retry or a move to another worker.
"""

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from cygnet.base.messages import PositionLogprobs
from cygnet.base.sampling import SamplingParams
from cygnet.engine.plan import SampledToken

PREFILTER = 1024
"""Likeliest tokens examined before a full sort of the vocabulary is resorted to."""


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides output token `index` of a sequence with this seed."""
    data = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return (int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 11) / (1 << 53)


@dataclass
class SamplingState:
    """What the sampler remembers of a request: its settings, seed, and the counts that penalties need."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    num_prompt_tokens: int
    seed: int = field(init=False)
    prompt_ids: Tensor | None = field(init=False, default=None)
    output_counts: dict[int, int] = field(init=False, default_factory=dict)
    counts_outputs: bool = field(init=False)
    """Whether `append` does anything."""
    plain_from: float = field(init=False)
    """Output token from which on the largest logit is all that is asked for; infinite if never."""

    def __post_init__(self) -> None:
        params = self.params
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.counts_outputs = params.has_penalties
        plain = params.greedy and not params.has_penalties and not params.logit_bias and params.logprobs is None
        self.plain_from = params.min_tokens if plain else math.inf

    def start(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens known at admission: the prompt and, after a preemption, earlier output."""
        if self.params.has_penalties:
            self.prompt_ids = torch.tensor(sorted(set(token_ids[: self.num_prompt_tokens])))
            for token in token_ids[self.num_prompt_tokens :]:
                self.append(token)

    def append(self, token_id: int) -> None:
        if self.counts_outputs:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def counts_agree(self, token_ids: Sequence[int]) -> bool:
        """Whether the counts are those of the output in `token_ids` (for audits)."""
        return not self.params.has_penalties or self.output_counts == Counter(token_ids[self.num_prompt_tokens :])


@torch.inference_mode()
def sample(logits: Tensor, states: Sequence[SamplingState], num_outputs: Sequence[int]) -> list[SampledToken]:
    """Choose one token per row.

    `logits` [rows, vocab] in fp32 is left as it is; `num_outputs[r]` is how many output tokens row `r` has already.
    Log probabilities are those of the unmodified logits.
    """
    if all_plain_greedy(states, num_outputs):
        tokens = logits.argmax(dim=-1).tolist()
        return [SampledToken(token) for token in tokens]
    chosen = []
    for row, state, count in zip(logits, states, num_outputs, strict=True):
        token = _choose(row, state, count)
        chosen.append(SampledToken(token, _logprobs(row, token, state.params.logprobs)))
    return chosen


def all_plain_greedy(states: Sequence[SamplingState], num_outputs: Sequence[int]) -> bool:
    """Whether the largest logit is all that is asked for, in every row."""
    return all(count >= state.plain_from for state, count in zip(states, num_outputs, strict=True))


def _choose(row: Tensor, state: SamplingState, num_outputs: int) -> int:
    params = state.params
    row = _modify(row, state, num_outputs)
    if params.greedy:
        return int(row.argmax())
    return _draw(row / params.temperature, params, uniform(state.seed, num_outputs))


def _modify(row: Tensor, state: SamplingState, num_outputs: int) -> Tensor:
    """Penalties, biases and the ban on early stops, on a copy."""
    params = state.params
    banned = state.stop_ids if num_outputs < params.min_tokens else ()
    if not (params.has_penalties or params.logit_bias or banned):
        return row
    row = row.clone()
    if params.has_penalties:
        ids = torch.tensor(list(state.output_counts), dtype=torch.long, device=row.device)
        if params.repetition_penalty != 1.0 and state.prompt_ids is not None:
            seen = torch.cat((state.prompt_ids.to(row.device), ids)).unique()
            values = row[seen]
            row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if state.output_counts:
            counts = torch.tensor(list(state.output_counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if banned:
        row[torch.tensor(banned, device=row.device)] = -math.inf
    return row


def _draw(scaled: Tensor, params: SamplingParams, u: float) -> int:
    """Inverse-CDF sampling with one uniform number, after top-k, top-p and min-p."""
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0:
        return _invert(torch.softmax(scaled, dim=-1, dtype=torch.float64), u)
    log_total = torch.logsumexp(scaled, dim=-1)
    vocab = scaled.shape[0]
    # Most of the mass sits in a few tokens: a full sort of a large vocabulary is the exception.
    few = min(PREFILTER, vocab) if params.top_k <= PREFILTER else vocab
    for count in (few, vocab):
        values, ids = torch.topk(scaled, count)
        probs = torch.exp((values - log_total).double())
        kept = _kept(probs, params)
        if kept < count or params.top_k == count:
            break
    return int(ids[_invert(probs[:kept], u)])


def _kept(probs: Tensor, params: SamplingParams) -> int:
    """How many of the descending `probs` survive top-k, then top-p of what that left, then min-p; at least one."""
    kept = len(probs) if params.top_k == 0 else min(params.top_k, len(probs))
    if params.top_p < 1.0:
        total = probs[:kept].sum() if params.top_k else 1.0
        before = torch.cumsum(probs[:kept], dim=0) - probs[:kept]
        kept = int((before < params.top_p * total).sum())
    if params.min_p > 0.0:
        kept = min(kept, int((probs >= params.min_p * probs[0]).sum()))
    return max(1, kept)


def _invert(probs: Tensor, u: float) -> int:
    cumulative = torch.cumsum(probs, dim=0)
    place = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return min(place, len(probs) - 1)


def _logprobs(row: Tensor, token: int, count: int | None) -> PositionLogprobs | None:
    if count is None:
        return None
    total = torch.logsumexp(row, dim=-1)
    values, ids = torch.topk(row, min(count, len(row))) if count else (row[:0], row[:0])
    top = list(zip(ids.long().tolist(), (values - total).tolist(), strict=True))
    return PositionLogprobs(token, float(row[token] - total), top)
