"""Which SWA windows stay cached once the request that made them moves on.

A window of MiMo-V2.5 weighs as much as the full KV of about 1,100 tokens, so keeping all of them is wrong; keeping only
the last one loses every branch. A rule names block boundaries worth a window. The tree keeps those windows until space
runs short, and evicts by what each one saves (`eviction.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from cygnet.base.registry import Registry

MESSAGE_WINDOWS = 4
"""Last messages of a prompt that the rule `message` keeps windows before."""


@dataclass(frozen=True, slots=True)
class RetentionContext:
    """What a rule may look at, in blocks unless said otherwise; known when a request is admitted."""

    prompt_blocks: int
    """Whole blocks that the same prompt could reuse; its last token is always computed."""
    num_full_blocks: int
    """Full hit."""
    num_safe_blocks: int
    """Window-safe hit."""
    diverges: bool
    """Whether another sequence goes on differently after the full hit."""
    window_blocks: int
    message_blocks: tuple[int, ...] = ()
    """Boundaries at or below which a message of the chat begins, ascending; empty when unknown."""


class RetentionRule(Protocol):
    """Boundaries (in blocks, from the start) whose windows should stay. Pure."""

    def __call__(self, context: RetentionContext) -> Iterable[int]: ...


RETENTION_RULES: Registry[RetentionRule] = Registry("retention rule")


@RETENTION_RULES.register("prompt_end")
def prompt_end(context: RetentionContext) -> Iterable[int]:
    """The last boundary at which the same prompt can resume: retries, `n` answers, changed last message."""
    return (context.prompt_blocks,)


@RETENTION_RULES.register("response_end")
def response_end(context: RetentionContext) -> Iterable[int]:
    """The end of whatever was computed, so that the next turn resumes there. Acted on when the request ends."""
    return ()


@RETENTION_RULES.register("branch")
def branch(context: RetentionContext) -> Iterable[int]:
    """Where this prompt leaves what another one went on with: a shared system prompt, an edited turn."""
    return (context.num_full_blocks,) if context.diverges else ()


@RETENTION_RULES.register("geometric")
def geometric(context: RetentionContext) -> Iterable[int]:
    """One, two, four, ... windows from the start: a branch anywhere finds one at no less than half its depth."""
    boundary = context.window_blocks
    while 0 < boundary < context.prompt_blocks:
        yield boundary
        boundary *= 2


@RETENTION_RULES.register("message")
def message(context: RetentionContext) -> Iterable[int]:
    """Where messages begin: the end of the system prompt, which other chats share, and the last few, which are edited,
    retried or shortened. Bounded, as a long chat has hundreds."""
    return dict.fromkeys(context.message_blocks[:1] + context.message_blocks[-MESSAGE_WINDOWS:])
