"""The fake engine passes the contract that the real client passes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from contracts.engine_client import CHECKS, Subject
from fakes.engine import FakeEngine


@asynccontextmanager
async def make_subject(*, max_running: int = 8, max_waiting: int = 64) -> AsyncIterator[Subject]:
    engine = FakeEngine(
        lambda r: [10 + (sum(r.prompt_token_ids) + i) % 90 for i in range(500)],
        max_running=max_running,
        max_waiting=max_waiting,
    )
    try:
        yield Subject(engine, engine.die)
    finally:
        await engine.aclose()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any) -> None:
    asyncio.run(check(make_subject))
