"""The engine's own process: `python -m cygnet.engine.runtime.process`, started by `client.EngineProcess`.

Reads one JSON line (`EngineStart`) from standard input (or ends quietly, if that closes instead), connects to the
ZeroMQ address in it, loads the model, then steps as long as there is work and sleeps on the socket when there is none.
It ends on `Shutdown`, and at once when its standard input closes, which is how it learns that its parent is gone.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import deque

import msgspec
import zmq

from cygnet.base.errors import CygnetError, RequestError
from cygnet.base.messages import (
    AbortRequests,
    AddRequest,
    CacheFlushed,
    CacheInspected,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineProgress,
    EngineStart,
    FlushCache,
    InspectCache,
    RequestOutput,
    Shutdown,
    StepOutputs,
    WatchCache,
)
from cygnet.engine.core import PreparedRequest
from cygnet.engine.runtime.local import STALL_S, LocalEngine
from cygnet.engine.runtime.setup import load_engine

STATS_INTERVAL_S = 0.2
QUIET_MS = 2000
"""How long nothing must have come in before idle time is used for an audit: a new request has to wait for its end."""
log = logging.getLogger("cygnet.engine")


Received = PreparedRequest | AbortRequests | FlushCache | InspectCache | WatchCache | Shutdown


class EngineLoop:
    """Moves messages between the socket and a LocalEngine.

    Where launching a step takes as long as the step (a CPU), outputs are sent as soon as they are there. Where a device
    works on its own, sending them waits until it has work again; and while it works, what comes in is decoded, checked
    and hashed. Either way messages take effect between two steps, in the order in which they came.

        CPU   | take in | schedule | step n ........... | apply | send n   |
        GPU   | take in | schedule | launch n | send n-1, prepare what comes | apply |
    """

    def __init__(self, engine: LocalEngine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._poller: zmq.Poller | None = None
        if engine.hears_store:
            self._poller = zmq.Poller()
            self._poller.register(socket, zmq.POLLIN)
            self._poller.register(engine.waker.fileno(), zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(EngineInput)
        self._encoder = msgspec.msgpack.Encoder()
        self._received: deque[Received] = deque()
        """Came in while a step was running."""
        self._outputs: list[RequestOutput] = []
        """Not sent yet."""
        self._stopping = False
        self._draining = False
        self._stats_at = 0.0
        self._stats_dirty = False

    def run(self) -> None:
        """Serve until told to stop. What there is to say of requests is said, whatever ends it."""
        try:
            while not self._stopping and not (self._draining and not self._engine.busy):
                self._take_in(block=not self._engine.busy)
                if self._engine.busy and not self._stopping:
                    self._step()
        finally:
            self._send()

    def _step(self) -> None:
        """One step, or a moment's wait where all requests wait for the store."""
        if not self._engine.asynchronous:
            self._send()
        if not self._engine.begin():
            self._send()
            self._poll(int(STALL_S * 1000))
            return
        if self._engine.asynchronous:
            self._send()
            # Waiting for a GPU keeps a CPU busy anyway.
            while not self._engine.done:
                if self._socket.poll(0) and (message := self._receive()) is not None:
                    self._received.append(message)
            self._outputs += self._engine.finish()
        else:
            self._outputs += self._engine.finish()
            self._send()

    def _poll(self, timeout_ms: int | None) -> bool:
        """Wait until a message is there (True), or the store has something to say, or the time is over."""
        if self._poller is None:
            return bool(self._socket.poll(timeout_ms))
        events = dict(self._poller.poll(timeout_ms))
        if self._engine.waker.fileno() in events:
            self._engine.hear_store()
        return self._socket in events

    def _take_in(self, *, block: bool) -> None:
        """Let all messages there are take effect; with `block`, wait for the first."""
        if block and not self._received:
            self._wait()
        while not self._stopping and (self._received or self._socket.poll(0)):
            message = self._received.popleft() if self._received else self._receive()
            if message is not None:
                self._handle(message)

    def _wait(self) -> None:
        """Until a message comes, or the store makes work. First a last word on the statistics; and an audit once it is
        quiet."""
        if self._outputs or self._stats_dirty:
            self._send(force=self._stats_dirty)
        if self._engine.wants_rest and not self._poll(QUIET_MS):
            self._engine.rest()
        while not self._engine.busy and not self._poll(None):
            self._stats_dirty = True

    def _receive(self) -> Received | None:
        """The next message, made ready; `None` for a request that can't be served, which is refused at once."""
        message = self._decoder.decode(self._socket.recv())
        if not isinstance(message, AddRequest):
            return message
        try:
            return self._engine.prepare(message)
        except RequestError as error:
            self._refuse(message, error)
            return None

    def _handle(self, message: Received) -> None:
        self._stats_dirty = True
        match message:
            case PreparedRequest():
                try:
                    self._engine.add_prepared(message)
                except RequestError as error:
                    self._refuse(message.message, error)
            case AbortRequests(request_ids):
                self._outputs += self._engine.abort(request_ids)
            case FlushCache(store, ticket):
                dropped = self._engine.flush_cache(store=store)
                device, host = dropped.device_blocks, dropped.host_blocks
                log.info("cache flushed: %d blocks dropped on the device, %d in host memory", device, host)
                self._tell(CacheFlushed(ticket, dropped))
            case InspectCache(limit, ticket):
                self._tell(CacheInspected(ticket, self._engine.inspect_cache(limit)))
            case WatchCache(on):
                self._tell_changes()  # to those who follow already
                if (whole := self._engine.watch_cache(on=on)) is not None:
                    self._tell(whole)
            case Shutdown(drain):
                self._draining = drain
                self._stopping = not drain

    def _tell_changes(self) -> None:
        """What has changed in the cache, if somebody wants to know."""
        if (changed := self._engine.take_cache_changes()) is not None:
            self._tell(changed)

    def _tell(self, message: EngineOutput) -> None:
        """Say something that is not about requests, at once."""
        self._socket.send(self._encoder.encode(message))

    def _refuse(self, message: AddRequest, error: RequestError) -> None:
        kind = type(error).__name__
        self._outputs.append(RequestOutput(message.request_id, [], None, "error", error=error.message, error_type=kind))

    def _send(self, *, force: bool = False) -> None:
        self._tell_changes()
        now = time.monotonic()
        due = force or now - self._stats_at >= STATS_INTERVAL_S
        if not self._outputs and not due:
            return
        stats = self._engine.stats() if due else None
        if due:
            self._stats_at, self._stats_dirty = now, False
        else:
            self._stats_dirty = True
        outputs, self._outputs = self._outputs, []
        self._tell(StepOutputs(outputs, stats))


def _exit_with_parent() -> None:
    """End this process when the parent's end of standard input closes."""

    def watch() -> None:
        # Below Python's buffering, whose lock a daemon thread must not hold at exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    """Entry point of the process; its exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    start = msgspec.json.decode(line, type=EngineStart)
    logging.basicConfig(level=start.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _exit_with_parent()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(start.address)

    def send(message: EngineOutput) -> None:
        socket.send(msgspec.msgpack.encode(message))

    try:
        engine, ready = load_engine(
            start.config,
            eos_token_ids=start.eos_token_ids,
            report=lambda stage, done, total: send(EngineProgress(stage, done, total)),
        )
        send(ready)
        # What loading has made stays for good. The garbage collector would look at it again and again, between steps.
        gc.collect()
        gc.freeze()
        try:
            EngineLoop(engine, socket).run()
        finally:
            engine.close()
        return 0
    except CygnetError as error:
        send(EngineFailed(message=str(error)))
        return 1
    except Exception as error:
        log.exception("the engine stopped")
        send(EngineFailed(message=f"{type(error).__name__}: {error}"))
        return 1
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main())
