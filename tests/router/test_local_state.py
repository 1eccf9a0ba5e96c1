"""The state in memory under the contract of all states, with a clock that the test turns."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cygnet.router.local_state import LocalState
from router.state_contract import Fixture, StateContract

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
