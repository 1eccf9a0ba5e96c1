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

import msgspec
import zmq

from cygnet.base.errors import CygnetError, RequestError
from cygnet.base.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInput,
    EngineOutput,
    EngineProgress,
    EngineStart,
    FlushCache,
    RequestOutput,
    Shutdown,
    StepOutputs,
)
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.setup import load_engine

STATS_INTERVAL_S = 0.2
QUIET_MS = 2000
"""How long nothing must have come in before idle time is used for an audit: a new request has to wait for its end."""
log = logging.getLogger("cygnet.engine")


class EngineLoop:
    """Moves messages between the socket and a LocalEngine."""

    def __init__(self, engine: LocalEngine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(EngineInput)
        self._encoder = msgspec.msgpack.Encoder()
        self._stopping = False
        self._draining = False
        self._stats_at = 0.0
        self._stats_dirty = False

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping:
            outputs = self._receive(block=not self._engine.busy)
            if self._engine.busy:
                outputs += self._engine.step()
            self._send(outputs)
            if self._draining and not self._engine.busy:
                return

    def _receive(self, *, block: bool) -> list[RequestOutput]:
        """Take in all messages there are; with `block`, wait for the first."""
        outputs: list[RequestOutput] = []
        if block:
            self._wait()
        while not self._stopping and self._socket.poll(0):
            outputs += self._handle(self._decoder.decode(self._socket.recv()))
        return outputs

    def _wait(self) -> None:
        """Until a message comes. First a last word on the statistics; and an audit once it is quiet."""
        if self._stats_dirty:
            self._send([], force=True)
        if self._engine.wants_rest and not self._socket.poll(QUIET_MS):
            self._engine.rest()
        self._socket.poll()

    def _handle(self, message: EngineInput) -> list[RequestOutput]:
        self._stats_dirty = True
        match message:
            case AddRequest():
                try:
                    self._engine.add(message)
                except RequestError as error:
                    kind = type(error).__name__
                    failed = RequestOutput(message.request_id, [], None, "error", error=error.message, error_type=kind)
                    return [failed]
            case AbortRequests(request_ids):
                return self._engine.abort(request_ids)
            case FlushCache():
                log.info("cache flushed: %d blocks dropped", self._engine.core.flush_cache())
            case Shutdown(drain):
                self._draining = drain
                self._stopping = not drain
        return []

    def _send(self, outputs: list[RequestOutput], *, force: bool = False) -> None:
        now = time.monotonic()
        due = force or now - self._stats_at >= STATS_INTERVAL_S
        if not outputs and not due:
            return
        stats = self._engine.stats() if due else None
        if due:
            self._stats_at, self._stats_dirty = now, False
        else:
            self._stats_dirty = True
        self._socket.send(self._encoder.encode(StepOutputs(outputs, stats)))


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
        EngineLoop(engine, socket).run()
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
