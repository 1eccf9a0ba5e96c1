"""Runs the sequences of one request in the engine and tells, piece by piece, what they say."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cygnet.api.errors import SequenceFailedError, first_error
from cygnet.api.output import Delta, OutputProcessor, TextOptions
from cygnet.api.tokenization import Tokenizer
from cygnet.base.engine_client import EngineClient
from cygnet.base.errors import EngineDeadError, QueueFullError
from cygnet.base.messages import AddRequest, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.metrics import catalogue
from cygnet.metrics.recorder import Recorder

OnDelta = Callable[[int, Delta], Awaitable[None]]


@dataclass(frozen=True)
class Job:
    """One API request: every prompt is answered `n` times; choice `p * n + i` is answer `i` to prompt `p`.

    With a seed, answer `i` gets `seed + i`, so a prompt's answers differ from each other and don't depend on which
    other prompts came along.
    """

    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    text: TextOptions
    n: int = 1
    cache_salt: str = ""
    message_starts: list[int] = field(default_factory=list)
    """Where the messages of a chat (which is one prompt) begin, as far as is known."""

    def sequences(self) -> Iterator[tuple[int, AddRequest]]:
        """Choice index and engine request of every sequence."""
        for p, prompt in enumerate(self.prompts):
            for i in range(self.n):
                index = p * self.n + i
                seed = self.sampling.seed
                sampling = (
                    self.sampling
                    if not i or seed is None
                    else msgspec.structs.replace(self.sampling, seed=_wrap(seed + i))
                )
                yield (
                    index,
                    AddRequest(
                        f"{self.id}-{index}", prompt, sampling, self.cache_salt, message_starts=self.message_starts
                    ),
                )


def _wrap(seed: int) -> int:
    """`seed` in the range of a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


class CachedTokens(NamedTuple):
    """Tokens of one prompt that were cached, and how many of them came from host and store."""

    total: int
    host: int
    store: int


@dataclass
class Tally:
    """Token counts of one job, growing while it runs."""

    job: Job
    completion_tokens: int = 0
    _cached: dict[int, CachedTokens] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many answers it gets."""
        return sum(map(len, self.job.prompts))

    @property
    def cached(self) -> CachedTokens:
        """Prompt tokens that were in the cache. Of the answers to one prompt the one with the fewest counts: the others
        also found what their siblings had just computed."""
        counted = self._cached.values()
        return CachedTokens(sum(c.total for c in counted), sum(c.host for c in counted), sum(c.store for c in counted))

    def add(self, index: int, output: RequestOutput, delta: Delta) -> None:
        """Count one output of choice `index`."""
        self.completion_tokens += delta.num_tokens
        prompt = index // self.job.n
        cached = CachedTokens(output.num_cached_tokens, output.num_host_tokens, output.num_store_tokens)
        self._cached[prompt] = min(self._cached.get(prompt, cached), cached)


class _Timing:
    """Latencies of one sequence, as metrics. Times in ns."""

    def __init__(self, recorder: Recorder, arrival: int) -> None:
        self._recorder = recorder
        self._arrival = self._latest = arrival
        self._first: int | None = None
        self._tokens = 0

    def tokens(self, now: int, count: int, queued_ns: int) -> None:
        """`count` tokens came in at `now`, of a sequence that waited `queued_ns` for admission. Tokens that arrive
        together share the time since the ones before."""
        if count == 0:
            return
        if self._first is None:
            self._first = now
            self._recorder.observe(catalogue.TIME_TO_FIRST_TOKEN, (now - self._arrival) / 1e9)
            self._recorder.observe(catalogue.QUEUE_TIME, queued_ns / 1e9)
        else:
            gap = (now - self._latest) / count / 1e9
            self._recorder.observe(catalogue.INTER_TOKEN_LATENCY, gap, times=count)
        self._latest = now
        self._tokens += count

    def finished(self, prompt_tokens: int, reason: str) -> None:
        """The sequence ended for `reason`; latencies are recorded for those that ended well."""
        self._recorder.add(catalogue.REQUEST_SUCCESS, (reason,))
        if reason not in ("stop", "length") or self._first is None:
            return
        self._recorder.observe(catalogue.E2E_LATENCY, (self._latest - self._arrival) / 1e9)
        self._recorder.observe(catalogue.REQUEST_PROMPT_TOKENS, prompt_tokens)
        self._recorder.observe(catalogue.REQUEST_GENERATION_TOKENS, self._tokens)
        if self._tokens > 1:
            per_token = (self._latest - self._first) / (self._tokens - 1) / 1e9
            self._recorder.observe(catalogue.TIME_PER_OUTPUT_TOKEN, per_token)


class Generator:
    """Turns jobs into deltas. Holds no state between jobs."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        recorder: Recorder,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._clock = clock

    async def run(self, tally: Tally, on_delta: OnDelta, *, arrival: int) -> None:
        """Run all sequences of `tally.job` side by side and await `on_delta(choice, delta)` for every delta, in order
        per choice. When one fails, or this call is cancelled, all are aborted in the engine.

        `arrival` (ns, the generator's clock) is when the request came in. Raises `EngineDeadError`, `QueueFullError`,
        `SequenceFailedError`, and whatever `on_delta` raises.
        """
        if not self._engine.healthy:
            raise EngineDeadError("the engine is not running; no new requests are taken")
        try:
            async with asyncio.TaskGroup() as group:
                for index, request in tally.job.sequences():
                    group.create_task(self._run_one(tally, index, request, on_delta, arrival))
        except BaseExceptionGroup as error:
            raise first_error(error) from None

    async def _run_one(self, tally: Tally, index: int, request: AddRequest, on_delta: OnDelta, arrival: int) -> None:
        timing = _Timing(self._recorder, arrival)
        reason = "abort"
        try:
            last = await self._consume(tally, index, request, on_delta, timing)
            reason = last.finish_reason or "error"
            await on_delta(index, last)
        except QueueFullError:
            reason = "rejected"
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            timing.finished(len(request.prompt_token_ids), reason)

    async def _consume(
        self, tally: Tally, index: int, request: AddRequest, on_delta: OnDelta, timing: _Timing
    ) -> Delta:
        """Pass on all deltas but the last, which is returned when the engine is done with the sequence: a stop string
        must end the sequence before a slow client has been told of it."""
        processor = OutputProcessor(self._tokenizer, tally.job.text)
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                if output.finish_reason not in (None, "stop", "length"):
                    raise SequenceFailedError(output.error or f"generation ended early ({output.finish_reason})")
                delta = processor.push(output)
                timing.tokens(self._clock(), delta.num_tokens, output.queued_ns)
                tally.add(index, output, delta)
                if delta.finish_reason is not None:
                    return delta
                await on_delta(index, delta)
        raise SequenceFailedError("the engine's output ended without a reason")
