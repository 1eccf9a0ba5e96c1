"""A whole router in one coroutine: state, fleet, listener, housekeeping; and down again in the reverse order."""

import asyncio
import gc
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from cygnet.base.errors import ConfigError, StateUnavailableError
from cygnet.router.config import RouterConfig, parse_worker
from cygnet.router.local_state import LocalState
from cygnet.router.prompt import KeySettings
from cygnet.router.runtime.client import ClientConnection
from cygnet.router.runtime.fleet import Fleet
from cygnet.router.runtime.proxy import Proxy
from cygnet.router.runtime.redis_state import RedisState
from cygnet.router.runtime.tracing import Tracing, start_tracing
from cygnet.router.state import State

NS = 1_000_000_000
TICK_S = 0.1
TIDY_TICKS = 10
LEARN_S = 0.1
REDIS_START_S = 2.0
BACKLOG = 4096


def make_state(config: RouterConfig) -> State:
    """The state that the settings ask for. Redis need not answer yet."""
    if not config.redis.url:
        return LocalState(
            time.monotonic_ns, int(config.cache.ttl_s * NS), int(config.redis.lease_s * NS), config.cache.max_entries
        )
    return RedisState(
        config.redis.url,
        config.redis.namespace,
        config.redis.timeout_ms / 1000,
        int(config.cache.ttl_s * 1000),
        int(config.redis.lease_s * 1000),
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `ConfigError` when the address can't be had."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], info[1], info[2])
    except OSError as error:
        raise ConfigError(f"can't listen on server.host = {host!r}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; choose another address with --host or --port"
        ) from None
    return listener


class Service:
    """A router that runs. `stop` begins a graceful end, a second one makes it an immediate one."""

    def __init__(self, config: RouterConfig, tracing: Tracing | None = None) -> None:
        """`tracing` replaces what the settings say."""
        self._config = config
        self._tracing = tracing or start_tracing(config.tracing)
        self._stopped = asyncio.Event()
        self._hurried = asyncio.Event()
        self._state: State | None = None
        self.proxy: Proxy | None = None

    def stop(self) -> None:
        """Take no more requests, finish those that run within `server.drain_s`, end."""
        if self._stopped.is_set():
            self._hurried.set()
        self._stopped.set()

    async def run(self, listener: socket.socket, ready: Callable[[Proxy], None] = lambda proxy: None) -> None:
        """Serve on `listener`, which is closed in the end, until stopped."""
        config = self._config
        header = re.compile(config.cache.volatile_header) if config.cache.volatile_header else None
        keys = KeySettings(config.cache.block_bytes, config.cache.bytes_per_token, header)
        static = tuple(parse_worker(text) for text in config.workers.urls)
        authorization = f"Bearer {config.workers.api_key}".encode() if config.workers.api_key else b""
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            stack.callback(listener.close)
            state = make_state(config)
            stack.push_async_callback(state.aclose)
            if isinstance(state, RedisState):
                await state.pipe.wait_ready(REDIS_START_S)
            fleet = Fleet(state, config.workers, static, authorization, Proxy.now)
            stack.push_async_callback(fleet.aclose)
            if self._tracing is not None:
                stack.push_async_callback(self._tracing.aclose)
            proxy = self.proxy = Proxy(config, keys, state, fleet, self._tracing)
            await fleet.sync()
            stack.push_async_callback(proxy.followers.aclose)
            stack.push_async_callback(proxy.admin.aclose)
            server = await loop.create_server(lambda: ClientConnection(proxy), sock=listener)
            tasks = [loop.create_task(work(proxy)) for work in (self._tick, self._keep, self._learn)]
            stack.push_async_callback(_cancel, tasks)
            ready(proxy)
            stopped = loop.create_task(self._stopped.wait())
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            for task in tasks:
                if task.done():
                    task.result()  # housekeeping never ends by itself: this raises
            server.close()
            await self._drain(proxy)
            _write_log(proxy)

    async def _tick(self, proxy: Proxy) -> None:
        turn = 0
        while True:
            await asyncio.sleep(TICK_S)
            proxy.tick()
            _write_log(proxy)
            turn += 1
            if turn % TIDY_TICKS == 0:
                proxy.tidy()

    async def _keep(self, proxy: Proxy) -> None:
        """Follow the roster, renew leases, look at loads."""
        every_s = min(2.0, self._config.redis.lease_s / 5)
        while True:
            with suppress(StateUnavailableError):
                await proxy.fleet.sync()
                if self._config.cache.kv_events:
                    proxy.followers.sync(worker.url for worker in proxy.fleet.workers)
                proxy.state.renew(proxy.leases)
                proxy.loads = await proxy.state.loads()
            await asyncio.sleep(every_s)

    async def _learn(self, proxy: Proxy) -> None:
        """Hear what other routers have learned of their workers' caches."""
        while self._config.cache.kv_events:
            with suppress(StateUnavailableError):
                while entries := await proxy.state.taught():
                    proxy.followers.learned.note(entries)
            await asyncio.sleep(LEARN_S)
        await asyncio.Event().wait()  # ends with the others

    async def _drain(self, proxy: Proxy) -> None:
        proxy.stopping = True
        for connection in list(proxy.connections):
            connection.close_if_idle()
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.server.drain_s
        while proxy.connections and not self._hurried.is_set() and loop.time() < end:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), TICK_S)
            for connection in list(proxy.connections):
                connection.close_if_idle()
        for exchange in list(proxy.exchanges.values()):
            exchange.cut()
        for connection in list(proxy.connections):
            connection.abort()


async def serve(
    config: RouterConfig, listener: socket.socket, ready: Callable[[Proxy], None] = lambda proxy: None
) -> None:
    """Run a router until SIGINT or SIGTERM, then drain; a second signal ends it at once."""
    service = Service(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)
    gc.freeze()  # what has been loaded stays: a collection that looks at it again only holds requests up
    try:
        await service.run(listener, ready)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _write_log(proxy: Proxy) -> None:
    if proxy.log_lines:
        sys.stderr.write("".join(proxy.log_lines))
        sys.stderr.flush()
        proxy.log_lines.clear()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
