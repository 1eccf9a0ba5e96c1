"""The engine process's loop on its own: what it does with idle time."""

import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from cygnet.base.cache_report import FlushReport
from cygnet.base.messages import CacheFlushed, EngineOutput, EngineStats, FlushCache, Shutdown, StepOutputs
from cygnet.engine.runtime import process
from cygnet.engine.runtime.process import EngineLoop

TIMEOUT_S = 20


class RestingEngine:
    """Has nothing to do, and wants an audit."""

    busy = False
    wants_rest = True
    hears_store = False

    def __init__(self) -> None:
        self.rested = threading.Event()
        self.flushes = 0
        self.core = self

    def rest(self) -> None:
        self.wants_rest = False
        self.rested.set()

    def flush_cache(self, *, store: bool) -> FlushReport:
        self.flushes += 1
        return FlushReport(7, 2)

    def take_cache_changes(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(steps_total=7)


@pytest.fixture
def pair() -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as loops:
        ours.bind("inproc://loop")
        loops.connect("inproc://loop")
        ours.setsockopt(zmq.RCVTIMEO, TIMEOUT_S * 1000)
        yield ours, loops


@pytest.mark.parametrize("quiet_ms", [0, 3_600_000])
def test_idle_time_is_used_for_an_audit_once_it_is_quiet(
    pair: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"], quiet_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before: a message that comes in meanwhile is handled first."""
    monkeypatch.setattr(process, "QUIET_MS", quiet_ms)
    ours, loops = pair
    engine = RestingEngine()
    thread = threading.Thread(target=EngineLoop(engine, loops).run, daemon=True)  # type: ignore[arg-type]
    thread.start()
    if quiet_ms == 0:
        assert engine.rested.wait(TIMEOUT_S)
    ours.send(msgspec.msgpack.encode(FlushCache(ticket=5)))
    assert msgspec.msgpack.decode(ours.recv(), type=EngineOutput) == CacheFlushed(5, FlushReport(7, 2))
    said = msgspec.msgpack.decode(ours.recv(), type=StepOutputs)
    assert said.stats is not None
    assert said.stats.steps_total == 7
    assert engine.flushes == 1
    ours.send(msgspec.msgpack.encode(Shutdown()))
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert engine.rested.is_set() == (quiet_ms == 0)
