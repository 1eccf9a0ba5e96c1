"""Whether the server takes requests, drains, or is out of patience; and the watch that ends a request's work early."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from cygnet.api.errors import ClientDisconnectedError, first_error
from cygnet.base.errors import EngineDeadError

T = TypeVar("T")


class Lifecycle:
    """Set by the server, read by everything that runs long. Goes forward only: serving → draining → expired."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        """No new work is taken; what runs may finish."""
        self.expired = asyncio.Event()
        """What still runs must end now."""

    def drain(self) -> None:
        """Take no new work."""
        self.draining.set()

    def expire(self) -> None:
        """End what still runs."""
        self.draining.set()
        self.expired.set()


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_watched(work: Coroutine[Any, Any, T], receive: Receive, lifecycle: Lifecycle) -> T:
    """The result of `work`, cancelled as soon as the client has gone (`ClientDisconnectedError`) or the server can't
    wait for it any longer (`EngineDeadError`)."""

    async def gone() -> None:
        await wait_disconnect(receive)
        raise ClientDisconnectedError

    async def expired() -> None:
        await lifecycle.expired.wait()
        raise EngineDeadError("the server is shutting down and could not finish this request in time")

    try:
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(gone()), group.create_task(expired())]
            result = await work
            for watcher in watchers:
                watcher.cancel()
        return result
    except BaseExceptionGroup as error:
        raise first_error(error) from None
