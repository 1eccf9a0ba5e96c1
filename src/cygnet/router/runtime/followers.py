"""Follows the caches of workers that tell what they hold (`GET /kv/events`, see `cygnet.api.kv_events`)."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import httptools
import msgspec

from cygnet.base.messages import CacheChanged
from cygnet.base.residency import FORMAT, Greeting
from cygnet.kv.residency import ResidencyView
from cygnet.metrics import router as names
from cygnet.metrics.recorder import Recorder
from cygnet.router.learned import LearnedPrefixes
from cygnet.router.prompt import KeySettings, Prompt
from cygnet.router.scoring import Candidate

log = logging.getLogger(__name__)

PATH = "/kv/events"
CONNECT_S = 5.0
SILENCE_S = 20.0
"""A worker says something at least every five seconds."""
RETRY_S, MAX_RETRY_S = 0.5, 30.0
NOT_TOLD_S = 60.0
"""Between looks at a worker that does not tell: it may be replaced by one that does."""
MAX_FRAME_BYTES = 256 << 20
MAX_SENT = 8192
"""Prompts that were sent and of which nothing was heard yet; older ones are not learned from."""

_read_greeting = msgspec.msgpack.Decoder(Greeting).decode
_read_change = msgspec.msgpack.Decoder(CacheChanged).decode


class _NotTold(Exception):
    """This worker does not tell what it holds."""


class _Frames:
    """Frames out of an HTTP response as it comes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._parser = httptools.HttpResponseParser(self)
        self._is_binary = False
        self.ended = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_binary = value.startswith(b"application/octet-stream")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 500:
            raise ConnectionError(f"{PATH} answered {status}")
        if status != 200 or not self._is_binary:
            raise _NotTold(f"{PATH} answered {status}")

    def on_body(self, data: bytes) -> None:
        self._data += data

    def on_message_complete(self) -> None:
        self.ended = True

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Frames that are whole now; empty ones are signs of life. Raises `OSError`, `ValueError`, `_NotTold`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise ValueError(f"not HTTP: {error}") from None
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._data) < 4 + size:
                return
            found = bytes(self._data[4 : 4 + size])
            del self._data[: 4 + size]
            yield found


class Followers:
    """One task per worker that keeps a view of what it holds, and what was learned of prompts from all of them.

    Invariant: a view is asked only while its connection stands and nothing was missed; otherwise its worker is judged
    by what was routed to it, like one that does not tell.
    """

    def __init__(
        self,
        keys: KeySettings,
        authorization: bytes,
        recorder: Recorder,
        max_entries: int,
        teach: Callable[[dict[bytes, bytes]], None],
    ) -> None:
        """`teach` is told what is new of what was learned."""
        self._keys = keys
        self._authorization = authorization
        self._recorder = recorder
        self._teach = teach
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._views: dict[str, ResidencyView] = {}
        self._sent: OrderedDict[bytes, Prompt] = OrderedDict()
        self.learned = LearnedPrefixes(max_entries)

    @property
    def views(self) -> dict[str, ResidencyView]:
        """By url of the worker: what it holds, where that is known now."""
        return self._views

    def sync(self, urls: Iterable[str]) -> None:
        """Follow the workers `urls`, and no others."""
        wanted = set(urls)
        for task in self._tasks.values():
            if task.done():
                task.result()  # following never ends by itself: this raises
        for url in self._tasks.keys() - wanted:
            task = self._tasks.pop(url)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for url in wanted - self._tasks.keys():
            self._tasks[url] = self._loop.create_task(self._follow_always(url), name=f"follow {url}")

    # --- on the hot path

    def sent(self, request_id: bytes, url: str, prompt: Prompt) -> None:
        """A request was sent to a worker."""
        if url in self._views and prompt.chain:
            self._sent[request_id] = prompt
            if len(self._sent) > MAX_SENT:
                self._sent.popitem(last=False)

    def known(
        self, prompt: Prompt, candidates: Sequence[Candidate], urls: dict[int, str]
    ) -> tuple[tuple[int, ...], int]:
        """What each candidate is known to spare of a prompt (see `RouteRequest.known`), and how many blocks of its
        chain that is about. `urls` are workers by slot.
        """
        if not self._views or not prompt.chain:
            return (), 0
        known = self.learned.find(prompt.chain)
        if not known.keys:
            return (), 0
        block_tokens = self._keys.block_tokens
        spared = []
        for candidate in candidates:
            view = self._views.get(urls.get(candidate.slot, ""))
            if view is None:
                spared.append(-1)
                continue
            count, part = view.reusable(known.keys)
            spared.append(min(prompt.tokens, int(known.depths[count - 1] * block_tokens * part)) if count else 0)
        return tuple(spared), known.depths[-1]

    # --- following

    async def _follow_always(self, url: str) -> None:
        wait_s = RETRY_S
        while True:
            began = self._loop.time()
            try:
                await self._follow(url)
                reason = "it ended"
            except _NotTold as error:
                log.debug("worker %s does not tell what it holds: %s", url, error)
                await asyncio.sleep(NOT_TOLD_S)
                continue
            except (OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
                reason = str(error) or type(error).__name__
            if self._loop.time() - began > MAX_RETRY_S:
                wait_s = RETRY_S
            log.info("following the cache of %s begins anew in %.1f s: %s", url, wait_s, reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def _follow(self, url: str) -> None:
        """Follow one connection to its end. Raises when it is not to be trusted (any longer)."""
        parts = urlsplit(url)
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            head = f"GET {PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n".encode()
            if self._authorization:
                head += b"Authorization: %s\r\n" % self._authorization
            writer.write(head + b"\r\n")
            frames = _Frames()
            view: ResidencyView | None = None
            while not frames.ended:
                async with asyncio.timeout(SILENCE_S):
                    data = await reader.read(1 << 18)
                if not data:
                    raise ConnectionError("the connection was closed")
                for frame in frames.feed(data):
                    if not frame:
                        continue
                    if view is None:
                        view = self._greeted(_read_greeting(frame))
                    else:
                        self._told(url, view, _read_change(frame))
        finally:
            if self._views.pop(url, None) is not None:
                self._recorder.add(names.KV_RESYNCS, (url,))
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    def _greeted(greeting: Greeting) -> ResidencyView:
        if greeting.version != FORMAT:
            raise _NotTold(f"it speaks version {greeting.version} of the format, not {FORMAT}")
        return ResidencyView(greeting.geometry, greeting.block_size, rebuild=greeting.rebuild)

    def _told(self, url: str, view: ResidencyView, told: CacheChanged) -> None:
        if not view.apply(told):
            raise ValueError(f"what it told (number {told.sequence}) does not go on from what it told before")
        self._views[url] = view
        for request_id, num_tokens, key in told.prompts:
            prompt = self._sent.pop(request_id.encode(), None)
            tip = view.find(key)
            if prompt is not None and tip is not None:
                text_blocks = max(prompt.tokens / self._keys.block_tokens, len(prompt.chain) / 8)
                self._teach(self.learned.learn(prompt.chain, text_blocks, tip, num_tokens, view.block_size))

    async def aclose(self) -> None:
        """Stop following."""
        tasks = [*self._tasks.values(), *self._ending]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
