"""The state in memory under the contract of all states, with a clock that the test turns."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from cygnet.router.local_state import LocalState
from cygnet.router.state import RouteRequest
from cygnet.router.view import WorkerRecord
from router.chains import chain_of
from router.state_contract import Fixture, StateContract, plan_for

NS = 1_000_000_000


@pytest.fixture
def fix() -> Any:
    @asynccontextmanager
    async def open_() -> AsyncIterator[Fixture]:
        now = 0

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += int(seconds * NS)

        state = LocalState(lambda: now, ttl_ns=600 * NS, lease_ns=30 * NS, max_entries=1 << 16)
        yield Fixture(state, sleep, ttl_s=600, lease_s=30)
        assert state.audit() == []

    return open_()


class TestLocalState(StateContract):
    """See `StateContract`."""


@pytest.mark.slow
async def test_books_after_many_requests_and_much_churn() -> None:
    """100K requests of growing sessions while workers restart: a match is never more than what that incarnation got,
    slots are used again, loads end at exactly zero."""
    random = Random(3)
    now = 0
    ttl = 500
    state = LocalState(lambda: now, ttl_ns=ttl, lease_ns=10**9, max_entries=1 << 14)
    urls = [f"http://worker-{number}:1" for number in range(6)]
    slots = {url: await state.join(WorkerRecord(url=url)) for url in urls}
    held: dict[int, set[bytes]] = {slot: set() for slot in slots.values() if slot is not None}
    sessions = [[number] for number in range(40)]
    decisions: list[Any] = []
    running: list[str] = []
    reused = 0
    for turn in range(100_000):
        now += 1
        if turn % 40 == 0:
            url = random.choice(urls)
            old = slots[url]
            assert old is not None
            new = slots[url] = await state.restart(url, old)
            assert new is not None
            reused += new < len(urls)
            held[new] = set()
        session = random.randrange(40)
        words = sessions[session] = [*sessions[session], turn]
        if len(words) > 40 or random.random() < 0.1:
            words = sessions[session] = [turn]
        chain = chain_of(words)
        plan = plan_for([slot for slot in slots.values() if slot is not None])
        state.route(RouteRequest(str(turn), chain, len(words), 1, plan, random.random()), decisions.append)
        decision = decisions.pop()
        keys = [chain[i : i + 8] for i in range(0, len(chain), 8)]
        assert all(key in held[decision.slot] for key in keys[: decision.matched_tokens])
        held[decision.slot].update(keys)
        running.append(str(turn))
        if len(running) > 20:
            state.release(running.pop(random.randrange(20)))
    assert reused > 100
    assert len(state.index) <= 1 << 14
    for name in running:
        state.release(name)
    assert await state.loads() == {}
    assert state.audit() == []
