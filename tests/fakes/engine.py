"""An engine without a model: says what a test scripts, token by token, and keeps the promises of `EngineClient`.

Runs by itself, one token per sequence and step, or, with `manual=True`, only when the test calls `step()`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cygnet.base.cache_report import CacheReport, FlushReport, PoolReport, SequenceReport
from cygnet.base.errors import EngineDeadError, QueueFullError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockKey
from cygnet.base.messages import (
    AddRequest,
    CacheChanged,
    EngineReady,
    EngineStats,
    PoolStats,
    PositionLogprobs,
    RequestOutput,
)
from cygnet.base.residency import ADDED, REMOVED, WINDOW_GONE, WINDOW_LIVE, CacheChange, PromptCached
from cygnet.kv.hashing import extend_keys, root_key

BLOCK = 4
Reply = Callable[[AddRequest], Sequence[int]]


class _Sequence:
    """One request and the outputs its reader has not taken yet, merged into one."""

    def __init__(self, request: AddRequest, reply: Sequence[int], cached: int) -> None:
        self.request = request
        self.reply = list(reply)
        self.cached = cached
        self.produced = 0
        self.pending: RequestOutput | None = None
        self.failure: Exception | None = None
        self.news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self.pending is not None:
            output = msgspec.structs.replace(
                output,
                token_ids=self.pending.token_ids + output.token_ids,
                logprobs=None if output.logprobs is None else (self.pending.logprobs or []) + output.logprobs,
            )
        self.pending = output
        self.news.set()

    async def take(self) -> RequestOutput:
        while self.pending is None:
            if self.failure is not None:
                raise self.failure
            self.news.clear()
            await self.news.wait()
        output, self.pending = self.pending, None
        return output


@dataclass(frozen=True)
class _Block:
    """A cached block, the last of `ids[:end]`."""

    key: BlockKey
    parent: bytes
    salt: str
    ids: tuple[int, ...]
    end: int

    @property
    def added(self) -> list[CacheChange]:
        return [(ADDED, self.key, self.parent), (WINDOW_LIVE, self.key, b"")]


def _describe(salt: str, ids: tuple[int, ...]) -> SequenceReport:
    return SequenceReport(
        key=f"{hash((salt, ids)) % 2**48:012x}",
        prefix=f"{hash((salt, ids[:BLOCK])) % 2**48:012x}",
        num_tokens=len(ids),
        device_tokens=len(ids),
        host_tokens=0,
        store_tokens=0,
        windows=(),
        shared_tokens=0,
        reuses=0,
        num_running=0,
        age_s=0.0,
    )


class FakeEngine:
    """`reply(request)` gives the tokens of an answer, after which comes `eos`. Whole blocks of earlier prompts count as
    cached. With lower `tiers`, one of those blocks comes from each of them, as long as one is left for the device.

    Records: `requests` (everything added), `aborted` (ids), `flushes`.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        eos: int = 2,
        vocab_size: int = 512,
        max_model_len: int = 4096,
        max_running: int = 64,
        max_waiting: int = 64,
        manual: bool = False,
        tiers: tuple[str, ...] = ("device",),
    ) -> None:
        self._reply = reply
        self._eos = eos
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._manual = manual
        self._sequences: dict[str, _Sequence] = {}
        self._blocks: dict[bytes, _Block] = {}
        """By key; a block comes after its parent."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._added = asyncio.Condition()
        self._runner: asyncio.Task[None] | None = None
        self._alive = True
        self._stats = EngineStats(full=PoolStats(num_blocks=100, free=100, block_bytes=4096))
        self._stats = msgspec.structs.replace(self._stats, swa=PoolStats(num_blocks=40, free=40, block_bytes=8192))
        self._ready = EngineReady(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_requests=max_running + max_waiting,
            block_size=BLOCK,
            geometry=KVGeometry(GroupGeometry(2, 1, 8, 8, 2), GroupGeometry(4, 1, 8, 8, 2, window=8)),
            stats=self._stats,
            summary="a fake engine",
            tiers=tiers,
        )
        self.requests: list[AddRequest] = []
        self.aborted: list[str] = []
        self.flushes = 0
        self._listener: Callable[[CacheChanged], None] | None = None
        self._sequence = 0

    # -- EngineClient ------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> EngineReady:
        return self._ready

    @property
    def stats(self) -> EngineStats:
        count = len(self._sequences)
        running = min(count, self._max_running)
        return msgspec.structs.replace(self._stats, num_running=running, num_waiting=count - running)

    @property
    def healthy(self) -> bool:
        return self._alive

    @property
    def num_in_flight(self) -> int:
        return len(self._sequences)

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        if not self._alive:
            raise EngineDeadError("the engine is not running")
        if len(self._sequences) >= self._max_running + self._max_waiting:
            raise QueueFullError("the waiting queue is full", retry_after_s=7, request_id=request.request_id)
        if request.request_id in self._sequences:
            raise AssertionError(f"request id {request.request_id} is in use")
        sequence = await self._add(request)
        finished = False
        try:
            while not finished:
                output = await sequence.take()
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished and self._alive:
                self.aborted.append(request.request_id)
            self._remove(request.request_id)

    async def flush_cache(self, *, store: bool = False) -> FlushReport:
        if not self._alive:
            raise EngineDeadError("the engine is not running")
        self.flushes += 1
        dropped = len(self._blocks)
        for key in reversed(self._blocks):
            self._tell([(WINDOW_GONE, key, b""), (REMOVED, key, b"")])
        self._blocks.clear()
        return FlushReport(dropped, 0, store=store and "store" in self._ready.tiers)

    async def inspect_cache(self, limit: int) -> CacheReport:
        if not self._alive:
            raise EngineDeadError("the engine is not running")
        parents = {block.parent for block in self._blocks.values()}
        ends = [block for key, block in self._blocks.items() if key not in parents]
        pools = [("full", self._stats.full), ("swa", self._stats.swa)]
        return CacheReport(
            block_size=BLOCK,
            window=self._ready.geometry.window,
            tiers=self._ready.tiers,
            pools=tuple(
                PoolReport(
                    tier="device",
                    group=group,
                    num_blocks=pool.num_blocks,
                    used=pool.used,
                    cached=pool.cached,
                    free=pool.free,
                    block_bytes=pool.block_bytes,
                )
                for group, pool in pools
            ),
            num_sequences=len(ends),
            sequences=tuple(_describe(block.salt, block.ids[: block.end]) for block in ends[:limit]),
        )

    def watch_cache(self, listener: Callable[[CacheChanged], None] | None) -> None:
        self._listener = listener
        if listener is not None:
            whole = [change for block in self._blocks.values() for change in block.added]
            asyncio.get_running_loop().call_soon(listener, CacheChanged(self._sequence, True, whole, []))

    def _tell(self, changes: list[CacheChange], prompts: Sequence[PromptCached] = ()) -> None:
        if self._listener is not None and (changes or prompts):
            self._sequence += 1
            message = CacheChanged(self._sequence, False, changes, list(prompts))
            asyncio.get_running_loop().call_soon(self._listener, message)

    async def aclose(self, *, drain_s: float = 0.0) -> None:
        self._alive = False
        if drain_s and self._sequences:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_s)
        self.die()
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None

    # -- for tests ---------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """As if the engine process had been killed."""
        self._alive = False
        for sequence in self._sequences.values():
            sequence.failure = EngineDeadError("the engine process has ended")
            sequence.news.set()

    def step(self, count: int = 1) -> None:
        """Give every running sequence its next token, `count` times."""
        for _ in range(count):
            for sequence in list(self._sequences.values())[: self._max_running]:
                self._advance(sequence)

    def fail(self, request_id: str, message: str) -> None:
        """End one sequence with an error."""
        self._sequences[request_id].put(RequestOutput(request_id, [], finish_reason="error", error=message))

    async def wait_added(self, count: int) -> None:
        """Return when `count` requests have been added since the start."""
        async with asyncio.timeout(10), self._added:
            await self._added.wait_for(lambda: len(self.requests) >= count)

    async def wait_idle(self) -> None:
        """Return when no sequence is in flight."""
        await asyncio.wait_for(self._idle.wait(), 10)

    def _has(self, tier: str) -> bool:
        return tier in self._ready.tiers

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _add(self, request: AddRequest) -> _Sequence:
        sequence = _Sequence(request, self._reply(request), self._cached(request))
        self._sequences[request.request_id] = sequence
        self._idle.clear()
        prompt = len(request.prompt_token_ids)
        self._count(
            prompt_tokens_total=prompt,
            prefix_query_tokens_total=prompt,
            full_hit_tokens_total=sequence.cached,
            window_safe_hit_tokens_total=sequence.cached,
            effective_hit_tokens_total=sequence.cached,
            computed_tokens_total=prompt - sequence.cached,
        )
        async with self._added:
            self.requests.append(request)
            self._added.notify_all()
        if not self._manual:
            self._wake.set()
            if self._runner is None:
                self._runner = asyncio.create_task(self._run())
        return sequence

    def _remove(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)
        if not self._sequences:
            self._idle.set()

    def _cached(self, request: AddRequest) -> int:
        ids = tuple(request.prompt_token_ids)
        keys: list[BlockKey] = []
        extend_keys(keys, root_key("fake", request.cache_salt), ids, BLOCK, len(ids))
        cached = 0
        for index, key in enumerate(keys, 1):
            if key not in self._blocks:
                parent = keys[index - 2] if index > 1 else b""
                self._blocks[key] = block = _Block(key, parent, request.cache_salt, ids, index * BLOCK)
                self._tell(block.added)
            elif index * BLOCK < len(ids):
                cached = index * BLOCK
        if keys:
            self._tell([], [(request.request_id, len(ids), keys[-1])])
        return cached

    def _count(self, **amounts: int) -> None:
        grown = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
        self._stats = msgspec.structs.replace(self._stats, **grown)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while any(s.produced >= 0 for s in self._sequences.values()):
                self.step()
                await asyncio.sleep(0)  # the readers' turn

    def _advance(self, sequence: _Sequence) -> None:
        if sequence.produced < 0:
            return  # finished; its reader has not taken the end yet
        sampling = sequence.request.sampling
        i = sequence.produced
        token = sequence.reply[i] if i < len(sequence.reply) else self._eos
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {self._eos})
        reason = None
        if token in stops and i + 1 > sampling.min_tokens:
            reason = "stop"
        elif i + 1 >= sampling.max_tokens:
            reason = "length"
        logprobs = None
        if sampling.logprobs is not None:
            top = [(token + k, -0.5 - k) for k in range(sampling.logprobs)]
            logprobs = [PositionLogprobs(token, -0.5, top)]
        self._count(generation_tokens_total=1, computed_tokens_total=1, steps_total=1)
        sequence.produced = i + 1 if reason is None else -1
        sequence.put(
            RequestOutput(
                sequence.request.request_id,
                [token],
                logprobs=logprobs,
                finish_reason=reason,
                stop_token_id=token if reason == "stop" else None,
                num_cached_tokens=sequence.cached,
                num_host_tokens=BLOCK if self._has("host") and sequence.cached > BLOCK else 0,
                num_store_tokens=BLOCK if self._has("store") and sequence.cached > 2 * BLOCK else 0,
            )
        )
