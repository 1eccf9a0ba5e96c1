"""What the engine's loop does while a device works, and that it changes no result: order of events, and whole runs
with and without overlap side by side."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.messages import (
    AbortRequests,
    AddRequest,
    EngineInput,
    EngineOutput,
    FlushCache,
    RequestOutput,
    Shutdown,
    StepOutputs,
)
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.process import EngineLoop
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.sizing import PoolSizes
from support.fake_runner import VOCAB, FakeRunner, LateRunner

TIMEOUT_MS = 20_000
GEOMETRY = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(3, 1, 4, 4, 2, window=6))
Socket = zmq.Socket[bytes]
Script = dict[tuple[str, int], list[EngineInput]]


class Watched:
    """The loop's end of a pair of sockets; notes what is sent, and does not wait for ever."""

    def __init__(self, socket: Socket, note: Callable[[str, Any], None]) -> None:
        self._socket = socket
        self._note = note

    def poll(self, timeout: int | None = None) -> int:
        there = self._socket.poll(TIMEOUT_MS if timeout is None else timeout)
        assert there or timeout is not None, "the loop would wait for ever"
        return there

    def recv(self) -> bytes:
        return self._socket.recv()

    def send(self, data: bytes) -> None:
        outputs = outputs_in(data)
        if outputs:
            self._note("send", [output.request_id for output in outputs])
        self._socket.send(data)


def outputs_in(data: bytes) -> list[RequestOutput]:
    """Outputs in a message of the engine's; none in what it says besides."""
    message = msgspec.msgpack.decode(data, type=EngineOutput)
    return message.outputs if isinstance(message, StepOutputs) else []


class Bench:
    """A loop over a fake runner. `script` says what comes in at which event; `events` is what happened."""

    def __init__(self, pair: tuple[Socket, Socket], late: bool, script: Script, **options: Any) -> None:
        self._ours, self._script = pair[0], script
        self.events: list[tuple[str, Any]] = []
        make = LateRunner if late else FakeRunner
        self.runner = make(GEOMETRY, 4, tell=self._note, **options)
        kv = KVManager(GEOMETRY, PoolSizes(4, 60, 30, 120), KVPolicy(track_freed=True))
        self.core = EngineCore(kv, SchedulerPolicy(4, 16), fingerprint="fake", vocab_size=VOCAB, max_requests=6)
        self._prepare, self.core.prepare = self.core.prepare, self._told_prepare  # type: ignore[method-assign]
        ticks = iter(range(1, 1 << 62, 1_000_000))
        self.engine = LocalEngine(self.core, self.runner, audit="step", clock_ns=lambda: next(ticks))
        self.loop = EngineLoop(self.engine, Watched(pair[1], self._note))  # type: ignore[arg-type]

    def _told_prepare(self, message: AddRequest) -> Any:
        self._note("prepare", message.request_id)
        return self._prepare(message)

    def _note(self, what: str, subject: Any) -> None:
        self.events.append((what, subject))
        if isinstance(subject, int):
            for message in self._script.pop((what, subject), ()):
                self._ours.send(msgspec.msgpack.encode(message))

    def run(self) -> list[RequestOutput]:
        """Until the loop ends; all outputs, without how long they were queued."""
        for message in self._script.pop(("start", 0), ()):
            self._ours.send(msgspec.msgpack.encode(message))
        self.loop.run()
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        said: list[RequestOutput] = []
        while self._ours.poll(0):
            said += outputs_in(self._ours.recv())
        assert self.runner.wrong == []
        return [msgspec.structs.replace(output, queued_ns=0) for output in said]

    def brief(self) -> str:
        """Events in short: L0 launch of step 0, w device at work, R0 its result, p prepare, s send."""
        short = {"launch": "L", "working": "w", "result": "R", "prepare": "p", "send": "s"}
        return " ".join(short[what] + (str(x) if what in ("launch", "result") else "") for what, x in self.events)


@pytest.fixture
def pair() -> Iterator[tuple[Socket, Socket]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as loops:
        ours.bind("inproc://loop")
        loops.connect("inproc://loop")
        yield ours, loops


def ask(name: str, max_tokens: int = 3, prompt: tuple[int, ...] = (1, 2, 3)) -> AddRequest:
    return AddRequest(name, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def start(*messages: EngineInput) -> Script:
    """Messages that are there at the beginning; the loop ends when all requests have."""
    return {("start", 0): [*messages, Shutdown(drain=True)]}


def test_outputs_are_sent_while_the_device_works(pair: tuple[Socket, Socket]) -> None:
    bench = Bench(pair, True, start(ask("a")))
    assert len(bench.run()) == 3
    assert bench.brief() == "p L0 w w w R0 L1 s w w w R1 L2 s w w w R2 s"


def test_outputs_are_sent_before_a_step_that_takes_the_cpu(pair: tuple[Socket, Socket]) -> None:
    bench = Bench(pair, False, start(ask("a")))
    assert len(bench.run()) == 3
    assert bench.brief() == "p L0 R0 s L1 R1 s L2 R2 s"


def test_refusals_wait_for_no_step(pair: tuple[Socket, Socket]) -> None:
    bench = Bench(pair, False, start(ask("a", 1), ask("b", 1, ())))
    assert [output.error for output in bench.run()] == ["the prompt is empty", None]
    assert bench.brief() == "p p s L0 R0 s"


def test_requests_are_prepared_while_the_device_works(pair: tuple[Socket, Socket]) -> None:
    """And run from the next step on; one that can't be served is refused, the others don't notice."""
    bad = ask("bad", 3, (1, VOCAB))
    bench = Bench(pair, True, start(ask("a")) | {("working", 0): [ask("b", 2), bad]})
    said = bench.run()
    assert bench.brief().startswith("p L0 w p w p w R0 L1 s w")
    assert [(output.request_id, output.error_type) for output in said][:2] == [
        ("bad", "InvalidRequestError"),
        ("a", None),
    ]
    assert [output.request_id for output in said][2:4] == ["a", "b"]
    assert [output.request_id for output in said].count("b") == 2


def test_an_abort_while_the_device_works(pair: tuple[Socket, Socket]) -> None:
    """Takes effect behind the step: its token still comes, then the end; another request is as it was."""
    bench = Bench(pair, True, start(ask("a", 9), ask("b", 4)) | {("working", 1): [AbortRequests(["a"])]})
    said = bench.run()
    mine = [output for output in said if output.request_id == "a"]
    assert [len(output.token_ids) for output in mine] == [1, 1, 0]
    assert mine[-1].finish_reason == "abort"
    assert sum(len(output.token_ids) for output in said if output.request_id == "b") == 4
    assert bench.engine.core.kv.pool_stats()[0].used == 0


@pytest.mark.parametrize("event", ["launch", "working"])
def test_shutdown_while_the_device_works(pair: tuple[Socket, Socket], event: str) -> None:
    """The step's outputs are sent; no other step is begun."""
    bench = Bench(pair, True, {("start", 0): [ask("a", 9)], (event, 1): [Shutdown()]})
    assert len(bench.run()) == 2
    assert bench.brief() == "p L0 w w w R0 L1 s w w w R1 s"


def test_draining_while_the_device_works(pair: tuple[Socket, Socket]) -> None:
    bench = Bench(pair, True, {("start", 0): [ask("a", 5)], ("working", 1): [Shutdown(drain=True)]})
    assert bench.run()[-1].finish_reason == "length"


def test_a_failure_on_the_device_leaves_nothing_unsaid(pair: tuple[Socket, Socket]) -> None:
    """What was decided before is sent: tokens of earlier steps, and the refusal of what came in meanwhile."""
    script = start(ask("a", 9)) | {("working", 1): [ask("bad", 3, ())]}
    bench = Bench(pair, True, script, fails_at=1)
    with pytest.raises(RuntimeError, match="the device failed"):
        bench.run()
    assert [(o.request_id, o.error_type) for o in bench.outputs()] == [("a", None), ("bad", "InvalidRequestError")]


def test_a_failing_launch_leaves_nothing_unsaid(pair: tuple[Socket, Socket]) -> None:
    """The tokens of the step before are still held back at that time."""
    bench = Bench(pair, True, start(ask("a", 9)))
    launch = bench.runner.launch

    def fail(plan: Any) -> Any:
        if plan.step == 1:
            raise RuntimeError("no memory")
        return launch(plan)

    bench.runner.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        bench.run()
    assert [output.request_id for output in bench.outputs()] == ["a"]


def random_script(rnd: Random) -> Script:
    """Requests, good and bad ones and too many, aborts and flushes, that come in while steps run."""
    script = start(ask("first", 30))
    for index in range(rnd.randrange(8, 30)):
        prompt = tuple(rnd.choice([1, 2]) for _ in range(rnd.randrange(0, 40)))
        message: EngineInput = ask(f"r{index}", rnd.randrange(1, 25), prompt)
        if rnd.random() < 0.3:
            message = AbortRequests([f"r{rnd.randrange(index + 1)}"])
        elif rnd.random() < 0.1:
            message = FlushCache()
        script.setdefault(("launch", rnd.randrange(25)), []).append(message)
    return script


@pytest.mark.parametrize("seed", range(25))
def test_overlap_changes_no_result(seed: int) -> None:
    """Every request gets the same outputs, whether they come while a device works or while the CPU does."""
    runs = []
    for late in (False, True):
        with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as loops:
            ours.bind("inproc://loop")
            loops.connect("inproc://loop")
            bench = Bench((ours, loops), late, random_script(Random(seed)))
            outputs: dict[str, list[RequestOutput]] = {}
            for output in bench.run():
                outputs.setdefault(output.request_id, []).append(output)
            runs.append((outputs, bench.core.stats()))
    assert runs[0] == runs[1]
