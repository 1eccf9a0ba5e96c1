"""Runs the application on a socket: loopback unless told otherwise, draining on SIGTERM and SIGINT."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from cygnet.api.service import Service
from cygnet.base.config import ApiSettings
from cygnet.base.errors import ConfigError

OnReady = Callable[[str, int], None]

BACKLOG = 2048
MAX_CONNECTIONS = 4096
KEEP_ALIVE_S = 30
LAST_WORDS_S = 5
"""Time that requests cut off at the end of draining have to say so to their clients."""


class Server(uvicorn.Server):
    """One server on one socket. A first signal (or `stop`) drains: no new connections, running requests may finish
    within `drain_s`, and those that don't end with an error event. A second signal ends them at once."""

    def __init__(self, app: Starlette, settings: ApiSettings, on_ready: OnReady | None = None) -> None:
        service = app.state.service
        assert isinstance(service, Service)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(settings.drain_s) + LAST_WORDS_S,
            )
        )
        self._lifecycle = service.lifecycle
        self._settings = settings
        self._on_ready = on_ready

    async def run_on(self, listener: socket.socket) -> None:
        """Serve on `listener`, which is closed at the end, until stopped."""
        await self.serve(sockets=[listener])

    def stop(self) -> None:
        """Begin to drain; the second time: end at once."""
        if self.should_exit:
            self.force_exit = True
            self._lifecycle.expire()
        self.should_exit = True
        self._lifecycle.drain()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Handle signals while serving. They are not raised again afterwards: whoever called has an engine to close."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.getsignal(sig) for sig in signals}
        loop = asyncio.get_running_loop()
        for sig in signals:
            loop.add_signal_handler(sig, self.stop)
        try:
            yield
        finally:
            for sig in signals:
                loop.remove_signal_handler(sig)
                signal.signal(sig, before[sig])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # somebody else began to listen between `listen` and now
            await self.lifespan.shutdown()
            raise ConfigError(f"can't listen on port {self._port(sockets)}: {error.strerror}") from None
        if self._on_ready is not None and sockets and not self.should_exit:
            host, port = sockets[0].getsockname()[:2]
            self._on_ready(host, port)

    @staticmethod
    def _port(sockets: list[socket.socket] | None) -> int:
        return int(sockets[0].getsockname()[1]) if sockets else 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.drain()
        expiry = asyncio.get_running_loop().call_later(self._settings.drain_s, self._lifecycle.expire)
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # in a hurry, uvicorn leaves the application's own ending out
                await self.lifespan.shutdown()
        finally:
            expiry.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. `ConfigError` says why there is none."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"api.host = {host!r} can't be resolved: {error.strerror or error}") from None
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = "choose another port (0: any free one) or stop what uses it"
        raise ConfigError(f"can't listen on {host} port {port}: {reason}; {hint}") from None
    listener.setblocking(False)
    return listener


async def serve(app: Starlette, settings: ApiSettings, *, on_ready: OnReady | None = None) -> None:
    """Serve `app` (made by `create_app`) at `settings.host` and `settings.port` until SIGTERM, SIGINT and the drain.

    `on_ready(host, port)` is called with the real address once requests are taken. Raises `ConfigError` when the
    address can't be had. Returns normally after a signal; closing the engine is the caller's next step.
    """
    listener = listen(settings.host, settings.port)
    await Server(app, settings, on_ready).run_on(listener)
