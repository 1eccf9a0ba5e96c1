"""What the API needs of a tokenizer, and a bounded thread pool that keeps long prompts off the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from cygnet.base.errors import QueueFullError

T = TypeVar("T")

INLINE_CHARS = 1024
"""Up to here, encoding takes less time than handing it to a thread."""
INLINE_BYTES = 64 << 10
"""Up to here, the same holds for parsing a body."""


class TextStream(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that `ids` complete; bytes of an unfinished character wait."""

    def flush(self) -> str:
        """What is left at the end."""


class Tokenizer(Protocol):
    """The part of `cygnet.model.tokenizer.Tokenizer` used here."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def token_text(self, token_id: int, /) -> str: ...

    def stream(self, *, skip_special_tokens: bool = True, continues_text: bool = False) -> TextStream: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...

    def message_starts(self, ids: Sequence[int]) -> list[int]: ...


class TokenizerPool:
    """Runs tokenizer calls in a few threads. At most `max_pending` wait or run; beyond that, `QueueFullError`.

    Invariant: `0 <= pending <= max_pending`, and `pending` is 0 when no call is under way.
    """

    def __init__(self, tokenizer: Tokenizer, *, workers: int = 2, max_pending: int = 256) -> None:
        self.tokenizer = tokenizer
        self.pending = 0
        self._max_pending = max_pending
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self.run(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`."""
        if len(ids) <= INLINE_CHARS:
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return await self.run(lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def parse(self, body: bytes, call: Callable[[], T]) -> T:
        """The result of `call`, which parses `body`."""
        return call() if len(body) <= INLINE_BYTES else await self.run(call)

    async def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, made in a thread."""
        if self.pending >= self._max_pending:
            raise QueueFullError(f"{self.pending} prompts are being tokenized already; try again shortly")
        self.pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self.pending -= 1

    def close(self) -> None:
        """Let the threads end. Calls not yet started are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
