"""A router that follows its workers' caches: Cygnet's own API over fake engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from api.harness import MODEL, TOKENIZER, Running, fake_engine, serving
from cygnet.api import kv_events
from cygnet.api.lifecycle import Lifecycle
from cygnet.base.messages import CacheChanged
from cygnet.router.prompt import read_prompt
from cygnet.router.runtime import followers
from cygnet.router.scoring import Candidate
from router.harness import Answer, Router, ask, routing, until
from router.mock_worker import MockWorker
from router.redis_process import RedisProcess

BLOCK_BYTES = 64
SETTINGS = {"cache__block_bytes": BLOCK_BYTES, "cache__bytes_per_token": 1.0, "routing__load_floor_tokens": 10_000}


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 1, **fields}


@asynccontextmanager
async def fleet(count: int = 2, **options: Any) -> AsyncIterator[tuple[list[Running], Router]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(serving(fake_engine())) for _ in range(count)]
        urls = tuple(worker.url for worker in workers)
        router = await stack.enter_async_context(routing([], workers__urls=urls, **SETTINGS, **options))
        await until(lambda: len(router.proxy.followers.views) == count)
        yield workers, router


async def complete(router: Router, text: str, **fields: Any) -> Answer:
    answer = await ask(router, prompt(text, **fields), path="/v1/completions")
    assert answer.status == 200, answer.body
    return answer


def holder(workers: list[Running], text: str) -> Running:
    """The one worker that got a prompt beginning so."""
    (found,) = [w for w in workers if any(text_of(r).startswith(text[:40]) for r in w.engine.requests)]
    return found


def text_of(request: Any) -> str:
    return TOKENIZER.decode(request.prompt_token_ids)


async def learned(router: Router, more_than: int = 0) -> None:
    await until(lambda: len(router.proxy.followers.learned) > more_than)


def known_of(router: Router, text: str) -> dict[str, int]:
    """What the router takes each worker to spare of a prompt; nothing for those that do not tell."""
    proxy = router.proxy
    urls = proxy.fleet.urls_by_slot
    read = read_prompt(json.dumps(prompt(text)).encode(), proxy._keys)
    known, _ = proxy.followers.known(read, [Candidate(slot) for slot in urls], urls)
    return dict(zip(urls.values(), known, strict=False))


async def test_what_was_computed_is_known_and_what_was_flushed_is_not() -> None:
    text = "the quick brown fox jumps over the lazy dog and on it goes " * 12
    async with fleet() as (workers, router):
        await complete(router, text)
        await learned(router)
        first = holder(workers, text)
        other = next(worker for worker in workers if worker is not first)
        spared = known_of(router, text + "more")
        assert spared[first.url] > 0.8 * len(text)
        assert spared[other.url] == 0
        await first.http.post("/reset_prefix_cache")
        await until(lambda: known_of(router, text + "more")[first.url] == 0)


async def test_a_flushed_worker_no_longer_draws_its_prompts() -> None:
    """By what was routed there it would: the holder gets the next prompt even though it is busier."""
    text = "the quick brown fox jumps over the lazy dog and on it goes " * 12
    for flush in (False, True):
        async with fleet() as (workers, router):
            await complete(router, text)
            await learned(router)
            first = holder(workers, text)
            if flush:
                await first.http.post("/reset_prefix_cache")
                await until(lambda r=router, u=first.url: known_of(r, text)[u] == 0)
            proxy = router.proxy
            slot = next(worker.slot for worker in proxy.fleet.workers if worker.url == first.url)
            proxy.state._ledger.hold("busy", slot, 2000, 1 << 62)  # type: ignore[attr-defined]
            before = len(first.engine.requests)
            await complete(router, text + " once more")
            assert (len(first.engine.requests) > before) == (not flush)
            proxy.state.release("busy")


async def test_what_one_router_learned_another_knows(shared_redis: RedisProcess) -> None:
    """Whichever of them a prompt came through, also before the other was there; and so is what is flushed."""
    text = "the quick brown fox jumps over the lazy dog and on it goes " * 12
    shared = {"redis__url": shared_redis.url, "redis__namespace": uuid4().hex}
    async with fleet(**shared) as (workers, ours):
        urls = tuple(worker.url for worker in workers)
        async with routing([], workers__urls=urls, **SETTINGS, **shared) as theirs:
            await until(lambda: len(theirs.proxy.followers.views) == len(workers))
            await complete(ours, text)
            await learned(theirs)
            first = holder(workers, text)
            assert known_of(theirs, text + "more") == known_of(ours, text + "more")
            assert known_of(theirs, text + "more")[first.url] > 0.8 * len(text)
            await complete(theirs, text + " and more of the same, to the end " * 9)
            await until(lambda: len(ours.proxy.followers.learned) == len(theirs.proxy.followers.learned))
            await first.http.post("/reset_prefix_cache")
            await until(lambda: known_of(theirs, text)[first.url] == 0)
        async with routing([], workers__urls=urls, **SETTINGS, **shared) as late:
            await learned(late, more_than=len(ours.proxy.followers.learned) - 1)


async def test_a_salt_keeps_prompts_apart() -> None:
    text = "a prompt that two tenants have in common, word by word, to the end " * 10
    async with fleet(1) as (workers, router):
        await complete(router, text, cache_salt="one")
        await learned(router)
        assert known_of(router, text) == {}
        await complete(router, text)
        await until(lambda: known_of(router, text).get(workers[0].url, 0) > 0)


async def test_workers_that_do_not_tell_are_judged_by_what_they_were_sent() -> None:
    async with MockWorker("a") as first, MockWorker("b") as second, routing([first, second]) as router:
        await until(lambda: all(w.received == [] for w in (first, second)))
        assert (await ask(router, {"model": "m", "prompt": "x" * 5000})).status == 200
        assert router.proxy.followers.views == {}


async def test_a_gap_begins_anew_with_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "RETRY_S", 0.01)
    text = "the quick brown fox jumps over the lazy dog and on it goes " * 12
    async with fleet(1) as (workers, router):
        await complete(router, text)
        await learned(router)
        view = router.proxy.followers.views[workers[0].url]
        workers[0].engine._sequence += 5  # as if five tellings had been lost
        await complete(router, "another prompt, which is told under a number that comes too early " * 5)
        await until(lambda: router.proxy.followers.views.get(workers[0].url, view) is not view)
        assert known_of(router, text)[workers[0].url] > 0


async def test_a_worker_that_goes_away_is_not_asked() -> None:
    async with fleet(2) as (workers, router):
        await asyncio.gather(*(complete(router, f"{n} a prompt of some length " * 20) for n in range(6)))
        workers[0].server.stop()
        await until(lambda: workers[0].url not in router.proxy.followers.views)
        assert workers[1].url in router.proxy.followers.views


async def test_a_follower_does_not_hold_up_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "QUIET_S", 1000.0)
    async with fleet(1) as (workers, _):
        workers[0].server.stop()
        await asyncio.wait_for(asyncio.shield(workers[0].task), 20)


async def test_following_can_be_switched_off() -> None:
    async with serving(fake_engine()) as worker, routing([], workers__urls=(worker.url,), cache__kv_events=False) as r:
        await complete(r, "hello " * 100)
        assert r.proxy.followers._tasks == {}


async def test_a_follower_that_lags_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no more memory than was agreed, and those who keep up go on."""
    monkeypatch.setattr(kv_events, "MAX_WAITING_BYTES", 200_000)
    engine, held, sent = fake_engine(), asyncio.Event(), 0
    endpoint = kv_events.KVEvents(engine, Lifecycle())

    async def slow(message: Any) -> None:
        if message["type"] == "http.response.body":
            await held.wait()

    async def quick(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    lagging, keeping_up = (asyncio.ensure_future(endpoint._follow(send)) for send in (slow, quick))
    await until(lambda: [f.sequence for f in endpoint._followers] == [0, 0])  # both have been told the whole
    for number in range(1, 100):
        told = CacheChanged(number, False, [(0, b"k" * 16, b"p" * 16)] * 1000, [])
        expected = sent + len(kv_events.frame(told))
        endpoint._told(told)
        await until(lambda expected=expected: sent >= expected)
        assert all(follower.waiting_bytes < 300_000 for follower in endpoint._followers if not follower.lagging)
    held.set()
    await asyncio.wait_for(lagging, 20)
    assert not keeping_up.done()
    keeping_up.cancel()
    await asyncio.wait([keeping_up])
    assert endpoint._followers == set()
    await engine.aclose()
