"""Coroutine tests, and a real redis-server."""

import asyncio
import inspect
import shutil
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest
import uvloop

from router.redis_process import RedisProcess

TEST_S = 60


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on uvloop, entering those of its arguments that are asynchronous contexts.

    What the loop reports as unhandled fails the test.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
    faults: list[str] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(repr(context)))
        async with asyncio.timeout(TEST_S), AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    uvloop.run(body())
    assert not faults
    return True


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """Path of redis-server; skips where there is none (CI installs it)."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    return found


@pytest.fixture(scope="session")
def shared_redis(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """One server for tests that leave it running."""
    with RedisProcess(redis_binary, tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture
def own_redis(redis_binary: str, tmp_path: Path) -> Iterator[RedisProcess]:
    """A server that the test may stop, freeze and restart."""
    with RedisProcess(redis_binary, tmp_path) as process:
        yield process
