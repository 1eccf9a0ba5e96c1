"""How the next token is chosen and when a request stops."""

from typing import Annotated

import msgspec
from msgspec import Meta

from cygnet.base.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy but for ties, and logits divided by it may overflow."""
MIN_REPETITION_PENALTY = 0.01
"""Logits divided by a smaller one may overflow, and then there is no distribution to draw from."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings of one sequence (`n` > 1 is fanned out into sequences by the API).

    A `temperature` below `MIN_TEMPERATURE` is greedy. Stop *strings* are matched where text is made (the API process),
    stop *ids* in the engine. With a `seed`, token `i` of a sequence depends only on its own logits, the seed and `i`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: Annotated[int, Meta(ge=0)] = 16
    min_tokens: int = 0
    """Stop ids are masked until this many tokens are out."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """How many alternatives to report per token; 0 reports the chosen token only, `None` nothing."""

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self) -> None:
        """Raise `InvalidRequestError` naming the first field out of range."""
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "greater than 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            (
                "repetition_penalty",
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= 100.0,
                f"between {MIN_REPETITION_PENALTY} and 100",
            ),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("logit_bias", all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "biases between -100 and 100"),
            ("logit_bias", len(self.logit_bias) <= 1024, "at most 1024 entries"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("stop_token_ids", len(self.stop_token_ids) <= 64, "at most 64 ids"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        )
        for param, good, expected in checks:
            if not good:
                value = getattr(self, param)
                raise InvalidRequestError(f"{param} must be {expected}, got {value!r}", param=param)
