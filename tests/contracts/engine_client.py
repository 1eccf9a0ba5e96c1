"""What every `EngineClient` must do. Each `check_*` takes a factory of subjects; real client and fake run all of them.

@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_contract(check):
    asyncio.run(check(make_subject))
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cygnet.base.cache_report import CacheReport
from cygnet.base.engine_client import EngineClient
from cygnet.base.errors import EngineDeadError, QueueFullError
from cygnet.base.messages import AddRequest, CacheChanged, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.kv.residency import ResidencyView

TIMEOUT_S = 30


@dataclass
class Subject:
    """A client with a running engine, and how to kill that engine without warning."""

    client: EngineClient
    kill: Callable[[], None]


class MakeSubject(Protocol):
    """Starts an engine whose context holds at least 512 tokens and whose vocabulary has at least 64."""

    def __call__(self, *, max_running: int = 8, max_waiting: int = 64) -> AbstractAsyncContextManager[Subject]: ...


def request(name: str, *, max_tokens: int, prompt: int = 12, logprobs: int | None = None) -> AddRequest:
    """A request that generates exactly `max_tokens` tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return AddRequest(name, [3 + (i * 7) % 50 for i in range(prompt)], sampling)


def start(client: EngineClient, added: AddRequest) -> AsyncGenerator[RequestOutput, None]:
    """The outputs, closable."""
    return client.generate(added)


async def collect(client: EngineClient, added: AddRequest, started: asyncio.Event | None = None) -> list[RequestOutput]:
    """All outputs of a request. `started` is set at the first."""
    collected: list[RequestOutput] = []
    async with asyncio.timeout(TIMEOUT_S), aclosing(start(client, added)) as outputs:
        async for output in outputs:
            collected.append(output)
            if started is not None:
                started.set()
    return collected


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds; fail after a while."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def tokens(outputs: list[RequestOutput]) -> list[int]:
    """The token ids of all outputs."""
    return [token for output in outputs for token in output.token_ids]


async def check_generate(make: MakeSubject) -> None:
    """All tokens come, in outputs of which only the last has a finish reason; then nothing is in flight."""
    async with make() as subject:
        assert subject.client.healthy
        outputs = await collect(subject.client, request("a", max_tokens=9, logprobs=2))
        assert len(tokens(outputs)) == 9
        assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert {o.request_id for o in outputs} == {"a"}
        assert len({o.num_cached_tokens for o in outputs}) == 1
        for output in outputs:
            assert output.logprobs is not None
            assert [p.token_id for p in output.logprobs] == output.token_ids
            assert all(len(p.top) == 2 for p in output.logprobs)
        assert subject.client.num_in_flight == 0


async def check_side_by_side(make: MakeSubject) -> None:
    """Requests that run together each get their own tokens, the same as alone."""
    async with make() as subject:
        lengths = [1, 2, 5, 17, 30]
        alone = [await collect(subject.client, request(f"alone{n}", max_tokens=n, prompt=8 + n)) for n in lengths]
        together = await asyncio.gather(
            *(collect(subject.client, request(f"together{n}", max_tokens=n, prompt=8 + n)) for n in lengths)
        )
        assert [tokens(o) for o in together] == [tokens(o) for o in alone]
        assert subject.client.num_in_flight == 0


async def check_early_close_aborts(make: MakeSubject) -> None:
    """Closing the iterator takes the sequence off the engine, which then serves others."""
    async with make(max_running=1) as subject:
        async with asyncio.timeout(TIMEOUT_S), aclosing(start(subject.client, request("long", max_tokens=400))) as long:
            assert (await anext(long)).token_ids
        await until(lambda: subject.client.num_in_flight == 0)
        assert len(tokens(await collect(subject.client, request("next", max_tokens=3)))) == 3


async def check_cancel_aborts(make: MakeSubject) -> None:
    """Cancelling the task that reads does the same."""
    async with make(max_running=1) as subject:
        started = asyncio.Event()
        reader = asyncio.create_task(collect(subject.client, request("long", max_tokens=400), started))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled()
        await until(lambda: subject.client.num_in_flight == 0)
        assert len(tokens(await collect(subject.client, request("next", max_tokens=3)))) == 3


async def check_slow_reader_gets_merged(make: MakeSubject) -> None:
    """What a slow reader has not taken is one output when it comes back; no token is lost or out of order."""
    async with make() as subject:
        async with asyncio.timeout(TIMEOUT_S), aclosing(start(subject.client, request("slow", max_tokens=40))) as slow:
            first = await anext(slow)
            await collect(subject.client, request("fast", max_tokens=60))  # meanwhile the slow one is done
            rest = [output async for output in slow]
        assert len(rest) == 1
        assert len(tokens([first, *rest])) == 40
        assert rest[0].finish_reason == "length"
        expected = tokens(await collect(subject.client, request("again", max_tokens=40)))
        assert tokens([first, *rest]) == expected


async def check_queue_full(make: MakeSubject) -> None:
    """Beyond the bound, `QueueFullError`; whoever was let in is served."""
    async with make(max_running=1, max_waiting=2) as subject:
        results = await asyncio.gather(
            *(collect(subject.client, request(f"r{i}", max_tokens=20)) for i in range(12)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, QueueFullError)]
        served = [r for r in results if isinstance(r, list)]
        assert len(refused) + len(served) == 12, results
        assert refused
        assert served
        assert all(r.retry_after_s >= 1 for r in refused)
        assert all(len(tokens(outputs)) == 20 for outputs in served)
        assert len(tokens(await collect(subject.client, request("after", max_tokens=2)))) == 2


async def check_dead_engine(make: MakeSubject) -> None:
    """When the engine dies, running requests and new ones raise `EngineDeadError`."""
    async with make() as subject:
        async with asyncio.timeout(TIMEOUT_S), aclosing(start(subject.client, request("a", max_tokens=400))) as outputs:
            await anext(outputs)
            subject.kill()
            raised = False
            try:
                async for _ in outputs:
                    pass
            except EngineDeadError:
                raised = True
            assert raised
        await until(lambda: not subject.client.healthy)
        assert subject.client.num_in_flight == 0
        try:
            await collect(subject.client, request("b", max_tokens=1))
        except EngineDeadError:
            return
        raise AssertionError("a dead engine took a request")


async def check_drain(make: MakeSubject) -> None:
    """`aclose` with a drain lets running requests finish, takes no new ones, and may be called twice."""
    async with make() as subject:
        started = asyncio.Event()
        running = asyncio.create_task(collect(subject.client, request("a", max_tokens=30), started))
        await asyncio.wait_for(started.wait(), TIMEOUT_S)
        closing = asyncio.create_task(subject.client.aclose(drain_s=TIMEOUT_S))
        await until(lambda: not subject.client.healthy)
        try:
            await collect(subject.client, request("b", max_tokens=1))
        except EngineDeadError:
            pass
        else:
            raise AssertionError("a draining engine took a request")
        assert len(tokens(await running)) == 30
        await asyncio.wait_for(closing, TIMEOUT_S)
        await subject.client.aclose()


async def check_flush(make: MakeSubject) -> None:
    """After `flush_cache` nothing is cached; before it, a repeated prompt is (all but its end)."""
    async with make() as subject:
        ask = 0

        async def cached() -> int:
            nonlocal ask
            ask += 1
            outputs = await collect(subject.client, request(f"r{ask}", max_tokens=1, prompt=100))
            return outputs[-1].num_cached_tokens

        assert await cached() == 0
        assert 0 < await cached() < 100
        dropped = await asyncio.wait_for(subject.client.flush_cache(), TIMEOUT_S)
        assert dropped.device_blocks > 0
        assert dropped.kept_blocks == 0
        assert (await asyncio.wait_for(subject.client.flush_cache(), TIMEOUT_S)).device_blocks == 0
        assert await cached() == 0


async def check_inspect(make: MakeSubject) -> None:
    """`inspect_cache` tells of as many sequences as are asked for, of all pools, and nothing after a flush."""
    async with make() as subject:
        client = subject.client

        async def inspect(limit: int) -> CacheReport:
            return await asyncio.wait_for(client.inspect_cache(limit), TIMEOUT_S)

        empty = await inspect(10)
        assert (empty.num_sequences, empty.sequences) == (0, ())
        assert empty.block_size == client.ready.block_size
        assert empty.tiers == client.ready.tiers
        assert [(pool.tier, pool.group) for pool in empty.pools][:2] == [("device", "full"), ("device", "swa")]
        for length in (40, 60):
            await collect(
                client, msgspec.structs.replace(request(f"r{length}", max_tokens=1), prompt_token_ids=[length] * length)
            )
        both, one = await inspect(10), await inspect(1)
        assert both.num_sequences == one.num_sequences == len(both.sequences) == 2
        assert len(one.sequences) == 1
        for sequence in both.sequences:
            assert sequence.num_tokens in (40, 60)
            assert sequence.device_tokens == sequence.num_tokens
            assert sequence.shared_tokens == 0
        assert len({sequence.key for sequence in both.sequences}) == 2
        await asyncio.wait_for(client.flush_cache(), TIMEOUT_S)
        assert (await inspect(10)).num_sequences == 0


async def check_watched_cache(make: MakeSubject) -> None:
    """A listener that comes late hears of everything, then of every change, until it is taken away."""
    async with make() as subject:
        client, view = subject.client, ResidencyView(subject.client.ready.geometry, subject.client.ready.block_size)
        heard: list[CacheChanged] = []

        def listen(changed: CacheChanged) -> None:
            heard.append(changed)
            assert view.apply(changed)

        await collect(client, request("before", max_tokens=1, prompt=40))
        client.watch_cache(listen)
        await until(lambda: view.valid)
        before = len(view)
        assert before >= 40 // client.ready.block_size
        await collect(client, request("a", max_tokens=3, prompt=60))
        await until(lambda: any(told.prompts for told in heard))
        ((name, num_tokens, key),) = [prompt for told in heard for prompt in told.prompts]
        block = view.find(key)
        assert (name, num_tokens) == ("a", 60)
        assert block is not None
        assert block.index + 1 == 60 // client.ready.block_size
        assert len(view) > before
        client.watch_cache(listen)  # a second time: a whole again
        await until(lambda: sum(told.whole for told in heard) == 2)
        assert len(view) > before
        await asyncio.wait_for(client.flush_cache(), TIMEOUT_S)
        await until(lambda: len(view) == 0)
        client.watch_cache(None)
        count = len(heard)
        await collect(client, request("b", max_tokens=1, prompt=60))
        assert len(heard) == count


async def check_questions_to_a_dead_engine(make: MakeSubject) -> None:
    """Whoever asks an engine that has died hears so."""
    async with make() as subject:
        subject.kill()
        await until(lambda: not subject.client.healthy)
        for ask in (subject.client.flush_cache, lambda: subject.client.inspect_cache(1)):
            try:
                await asyncio.wait_for(ask(), TIMEOUT_S)
            except EngineDeadError:
                continue
            raise AssertionError("a dead engine answered")


CHECKS = (
    check_generate,
    check_side_by_side,
    check_early_close_aborts,
    check_cancel_aborts,
    check_slow_reader_gets_merged,
    check_queue_full,
    check_dead_engine,
    check_drain,
    check_flush,
    check_inspect,
    check_watched_cache,
    check_questions_to_a_dead_engine,
)
