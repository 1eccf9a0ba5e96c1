"""The state in Redis: the contract of all states, and what Redis does when it is away, frozen, restarted or emptied."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from uuid import uuid4

import pytest

from cygnet.base.errors import StateUnavailableError
from cygnet.router.runtime.redis_state import RedisState
from cygnet.router.scoring import Plan
from cygnet.router.state import Decision, Lease, NoRoom
from cygnet.router.view import WorkerRecord
from router.redis_process import RedisProcess
from router.state_contract import Fixture, StateContract, plan_for

TTL_S, LEASE_S = 0.6, 0.4


@asynccontextmanager
async def opened(
    redis: RedisProcess, *, namespace: str = "", ttl_s: float = 600, lease_s: float = 30, timeout_s: float = 0.05
) -> AsyncIterator[Fixture]:
    name = namespace or uuid4().hex
    state = RedisState(redis.url, name, timeout_s=timeout_s, ttl_ms=int(ttl_s * 1000), lease_ms=int(lease_s * 1000))
    try:
        assert await state.pipe.wait_ready(10)
        yield Fixture(state, asyncio.sleep, ttl_s, lease_s)
    finally:
        await state.aclose()


async def until(condition: Any, limit_s: float = 10) -> None:
    """Poll until `condition()`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.01)


@pytest.fixture
def fix(shared_redis: RedisProcess, request: pytest.FixtureRequest) -> Any:
    short = "age" in request.node.name or "leases_of_the_dead" in request.node.name
    # Nothing is asked of time here, so that a busy machine is no Redis that hangs.
    return opened(shared_redis, timeout_s=5.0, **({"ttl_s": TTL_S, "lease_s": LEASE_S} if short else {}))


class TestRedisState(StateContract):
    """See `StateContract`."""


async def timed(fixture: Fixture, words: list[int], plan: Plan, name: str = "") -> tuple[Decision, float]:
    start = time.perf_counter()
    decision = await fixture.route(words, plan, name=name)
    assert isinstance(decision, Decision)
    return decision, time.perf_counter() - start


async def test_two_routers_share_everything(shared_redis: RedisProcess) -> None:
    async with opened(shared_redis, namespace="pair") as one, opened(shared_redis, namespace="pair") as two:
        slots = await one.workers(4)
        assert set((await two.state.roster()).workers) == set(slots)
        first = await one.placed([7] * 40, plan_for(slots), chance=0.8)
        second = await two.placed([7] * 45, plan_for(slots, match_weight=9))
        assert (second.slot, second.matched_tokens) == (first.slot, 400)
        assert await one.state.loads() == {first.slot: first.cost + second.cost}


async def test_concurrent_routers_do_not_herd(shared_redis: RedisProcess) -> None:
    """vllm router 177, aibrix 2423: choices by loads seconds old send everything to one worker."""
    herd: dict[str, Any] = {"namespace": "herd", "timeout_s": 5.0}
    async with opened(shared_redis, **herd) as one, opened(shared_redis, **herd) as two:
        plan = plan_for(await one.workers(4))
        turns = [(side, 1000 * turn + place) for turn in range(20) for place, side in enumerate((one, two))]
        decisions = await asyncio.gather(*(side.placed([word] * 10, plan) for side, word in turns))
        assert sorted(decision.slot for decision in decisions) == sorted([0, 1, 2, 3] * 10)


async def test_killed_redis_costs_no_request_and_little_time(own_redis: RedisProcess) -> None:
    async with opened(own_redis) as fix:
        slots = await fix.workers(4)
        await fix.state.loads()
        own_redis.kill()
        decisions = [await timed(fix, [turn] * 10, plan_for(slots)) for turn in range(40)]
        assert median(seconds for _, seconds in decisions) < 0.02
        assert {decision.slot for decision, _ in decisions} == set(slots)
        assert not any(decision.shared for decision, _ in decisions[1:])
        state = fix.state
        assert isinstance(state, RedisState)
        state._known_loads = dict.fromkeys(slots, 1 << 40)
        tight = replace(plan_for(slots), budget=1 << 30)
        assert isinstance(await fix.route([9] * 10, tight), NoRoom)
        state._heard_at -= 6  # loads that nobody lowers any more keep no request from a worker
        assert isinstance(await fix.route([9] * 10, tight), Decision)
        with pytest.raises(StateUnavailableError):
            await fix.state.join(WorkerRecord(url="http://new:1"))


async def test_frozen_redis_delays_the_first_requests_only(own_redis: RedisProcess) -> None:
    """litellm PR 35273: a Redis that accepts and never answers hung every request."""
    async with opened(own_redis) as fix:
        slots = await fix.workers(4)
        own_redis.freeze()
        first = await asyncio.gather(*(timed(fix, [turn] * 10, plan_for(slots)) for turn in range(20)))
        assert max(seconds for _, seconds in first) < 0.5  # one timeout of 50 ms, and what a busy machine adds
        then = [(await timed(fix, [99 + turn] * 10, plan_for(slots)))[1] for turn in range(21)]
        assert median(then) < 0.02
        own_redis.thaw()
        state = fix.state
        assert isinstance(state, RedisState)
        await until(lambda: state.pipe.ready)
        assert (await timed(fix, [5] * 10, plan_for(slots)))[0].shared


async def test_requests_placed_alone_are_entered_and_nothing_is_left(own_redis: RedisProcess) -> None:
    async with opened(own_redis) as fix:
        slots = await fix.workers(2)
        state = fix.state
        assert isinstance(state, RedisState)
        plan = plan_for(slots)
        own_redis.freeze()
        frozen = [await timed(fix, [turn] * 10, plan, f"frozen-{turn}") for turn in range(4)]
        own_redis.thaw()
        await until(lambda: state.pipe.ready)
        leases = [Lease(f"frozen-{turn}", decision.slot, decision.cost) for turn, (decision, _) in enumerate(frozen)]
        state.renew(leases)
        assert sum((await state.loads()).values()) >= 4 * 101
        for lease in leases:
            state.release(lease.request_id)
        assert await state.loads() == {}


async def test_releases_during_an_outage_are_made_up_for(own_redis: RedisProcess) -> None:
    async with opened(own_redis) as fix:
        slots = await fix.workers(2)
        state = fix.state
        assert isinstance(state, RedisState)
        for turn in range(10):
            await fix.placed([turn] * 10, plan_for(slots), name=f"r{turn}")
        own_redis.freeze()
        for turn in range(10):
            state.release(f"r{turn}")
        await until(lambda: not state.pipe.ready)
        own_redis.thaw()
        await until(lambda: state.pipe.ready)
        state.renew([])
        assert await state.loads() == {}


async def test_the_same_beginning_stays_together_without_redis(own_redis: RedisProcess) -> None:
    async with opened(own_redis) as one, opened(own_redis) as two:
        slots = await one.workers(4)
        own_redis.kill()
        plan = plan_for(slots)
        for turn in range(10):
            (a, _), (b, _) = [await timed(side, [turn] * 10, plan, f"r{turn}") for side in (one, two)]
            if turn:  # the very first one may still be lost with the connection
                assert a.slot == b.slot
            for side in (one, two):
                side.state.release(f"r{turn}")


async def test_budget_holds_without_redis(own_redis: RedisProcess) -> None:
    async with opened(own_redis) as fix:
        plan = plan_for(await fix.workers(1), budget=100)
        own_redis.kill()
        await timed(fix, [1] * 9, plan)
        assert await fix.route([2] * 9, plan) == NoRoom(0)


async def test_restarted_and_emptied_redis(own_redis: RedisProcess) -> None:
    async with opened(own_redis) as fix:
        slots = await fix.workers(2)
        await fix.placed([1] * 10, plan_for(slots), name="a")
        state = fix.state
        assert isinstance(state, RedisState)
        own_redis.kill()
        await until(lambda: not state.pipe.ready)
        own_redis.start()
        await until(lambda: state.pipe.ready)
        assert (await state.roster()).workers == {}
        assert await fix.workers(2) == slots
        state.renew([Lease("a", 0, 101)])
        assert await state.loads() == {0: 101}
        assert (await fix.placed([1] * 10, plan_for(slots))).slot == 1


async def test_flushed_scripts_are_sent_again(own_redis: RedisProcess) -> None:
    async with opened(own_redis, timeout_s=5.0) as fix:
        plan = plan_for(await fix.workers(2))
        await fix.placed([1] * 10, plan)
        own_redis.command("SCRIPT FLUSH")
        assert (await fix.placed([1] * 11, plan)).matched_tokens == 100


async def test_bytes_per_block(own_redis: RedisProcess) -> None:
    """docs/router.md states what a block of prompt costs in Redis."""

    def used() -> int:
        text = own_redis.command("INFO memory").decode()
        return int(next(line for line in text.splitlines() if line.startswith("used_memory:")).split(":")[1])

    async with opened(own_redis, namespace="cygnet", timeout_s=5.0) as fix:
        plan = plan_for(await fix.workers(16))
        await fix.placed([1], plan)
        before = used()
        for session in range(20):
            await fix.placed([session, *range(195)], plan, name=f"s{session}")
            fix.state.release(f"s{session}")
        await fix.state.loads()
        assert (used() - before) / (20 * 196) < 100


async def test_only_block_keys_expire(own_redis: RedisProcess) -> None:
    """With maxmemory-policy volatile-lru Redis evicts prefixes and never leases, loads or workers."""
    async with opened(own_redis, namespace="n", timeout_s=5.0) as fix:
        await fix.placed([1] * 40, plan_for(await fix.workers(2)))
        state = fix.state
        assert isinstance(state, RedisState)
        keys = await state.pipe.ask((b"KEYS", b"*"))
        assert len(keys) > 40
        for key in keys:
            expires = await state.pipe.ask((b"PTTL", key)) > 0
            assert expires == key.startswith(b"{n}:b:"), key


async def test_what_one_router_has_learned_all_hear(shared_redis: RedisProcess) -> None:
    name = uuid4().hex
    lessons = {bytes([n]) * 8: bytes([n]) * 16 for n in range(200)}
    async with opened(shared_redis, namespace=name) as ours, opened(shared_redis, namespace=name) as theirs:
        for key, block in lessons.items():
            ours.state.teach({key: block})
        ours.state.teach({})
        assert await all_taught(theirs) == lessons
        assert await all_taught(theirs) == await all_taught(ours) == {}
        theirs.state.teach({b"new": b"block"})
        assert await all_taught(ours) == {b"new": b"block"}
        other_version = f"XADD {{{name}}}:learned * by them of nonsense"
        shared_redis.command(other_version)
        foreign = (b"XADD", theirs.state._prefix + b"learned", b"*", b"of", b"another version")
        assert not isinstance(await theirs.state.pipe.ask(foreign), Exception)
        ours.state.teach({b"last": b"block"})
        assert await all_taught(theirs) == {b"last": b"block"}
        async with opened(shared_redis, namespace=name) as late:
            assert await all_taught(late) == lessons | {b"new": b"block", b"last": b"block"}
        assert int(shared_redis.command(f"PTTL {{{name}}}:learned").strip(b":\r\n")) > 0


async def all_taught(fixture: Fixture) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while part := await fixture.state.taught():
        found |= part
    return found


async def test_what_is_learned_while_redis_is_away_is_told_later(own_redis: RedisProcess) -> None:
    async with opened(own_redis, namespace="n") as ours, opened(own_redis, namespace="n") as theirs:
        own_redis.kill()
        await until(lambda: not ours.state.reachable)
        ours.state.teach({b"key": b"block"})
        with pytest.raises(StateUnavailableError):
            await ours.state.taught()
        ours.state.renew([])
        own_redis.start()
        await until(lambda: ours.state.reachable and theirs.state.reachable)
        ours.state.renew([])
        await ours.state.loads()
        assert await all_taught(theirs) == {b"key": b"block"}
