"""`cygnet bench calibrate`: measured steps of the real engine, and the simulator's cost model fitted to them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from cygnet.base.errors import ConfigError

if TYPE_CHECKING:
    from cygnet.engine.plan import StepPlan
    from cygnet.engine.runtime.local import LocalEngine
    from cygnet.sim.calibration import Sample
    from cygnet.sim.hardware import HardwareProfile

CHUNKS = (16, 64, 256, 512, 1024)
PREFIXES = (0, 1024, 4096)
BATCHES = ((1, 256), (1, 1024), (1, 4096), (2, 1024), (4, 512), (8, 256), (8, 1024), (16, 256), (16, 512), (32, 128))
"""Requests that decode, and how many tokens each has in the cache."""
MIXES = ((4, 512, 256), (8, 256, 64), (4, 512, 512))
"""A batch, and a chunk of a new prompt beside it."""
ROUNDS = 3
"""Of a kind of step with a chunk."""
DECODED = 9
"""Steps of a batch."""
ENDLESS = 1000
"""Tokens of an answer that is aborted in the end."""


@dataclass(frozen=True)
class Point:
    """A kind of step: `batch` requests decode after `context` tokens, and `chunk` tokens of a prompt after `prefix`."""

    batch: int = 0
    context: int = 0
    chunk: int = 0
    prefix: int = 0

    @property
    def name(self) -> str:
        decodes = [f"{self.batch} decode after {self.context}"] if self.batch else []
        return ", ".join([*decodes, *([f"chunk of {self.chunk} after {self.prefix}"] if self.chunk else [])])


POINTS = (
    *(Point(chunk=chunk, prefix=prefix) for prefix in PREFIXES for chunk in CHUNKS),
    *(Point(batch, context) for batch, context in BATCHES),
    *(Point(batch, context, chunk) for batch, context, chunk in MIXES),
)


class Measured(msgspec.Struct, frozen=True):
    """What a profile was fitted to. The median of several steps stands for each kind."""

    model: str
    machine: str
    kv_bytes: int
    memory_bytes: float
    samples: "list[tuple[str, int, int, list[tuple[int, int]], int]]"
    """Name, tokens, sampled, requests (start and number of tokens), nanoseconds."""


class Document(msgspec.Struct, frozen=True):
    """The file: a profile as the simulator takes it, and what it comes from."""

    profile: "dict[str, Any] | None"
    measured: Measured


def calibrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="profile to write, for a scenario's fleet.gpu (.json)")],
    model: Annotated[str, typer.Option(metavar="NAME", help="model to measure, as for `cygnet serve`")] = "gemma3-270m",
    facts: Annotated[
        str, typer.Option(metavar="NAME", help="the same model as `cygnet plan` knows it, or its config.json")
    ] = "gemma-3-270m",
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="any setting of `cygnet serve`; repeatable")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="begin no new kind of step after so long")] = 150.0,
) -> None:
    """Measure steps on this machine and fit the simulator's cost model to them.

    A grid of chunks, prefixes and batches, each a few times. What FILE has from an earlier call is not measured again,
    so that a calibration can be made in pieces, each at a quiet time.
    """
    from cygnet.cli.console import print_note, stdout
    from cygnet.cli.plan import find_facts
    from cygnet.sim.calibration import LEAST_SAMPLES, errors, fit

    described = find_facts(facts, None)
    before = _read(file)
    if before is not None and before.model != model:
        raise ConfigError(f"{file} is a calibration with {before.model}; give another file for {model}")
    known = before.samples if before is not None else []
    left = [point for point in POINTS if point.name not in {sample[0] for sample in known}]
    measured = before
    if left or measured is None:
        engine = _engine(model, sets or [])
        try:
            fresh = [_as_row(sample) for sample in measure(engine, left, seconds)]
            kv_bytes = engine.core.kv.geometry.full.dtype_bytes
        finally:
            engine.close()
        measured = Measured(model, _machine(), kv_bytes, _memory_bytes(), [*known, *fresh])
    samples = [_as_sample(row) for row in measured.samples]
    profile = None
    if len(samples) >= LEAST_SAMPLES:
        profile = fit(
            described,
            samples,
            name=file.stem,
            machine=measured.machine,
            memory_bytes=measured.memory_bytes,
            kv_bytes=measured.kv_bytes,
        )
    _write(file, Document(None if profile is None else msgspec.to_builtins(profile), measured))
    if profile is not None:
        _print(stdout(), profile, samples, errors(described, profile, samples, measured.kv_bytes))
    missing = len(POINTS) - len(samples)
    if missing:
        print_note(f"{missing} kinds of steps of {len(POINTS)} are not measured yet; run the same command again")


def read_profile(file: Path) -> "HardwareProfile":
    """The profile in a file that `calibrate` wrote. Raises `ConfigError`."""
    from cygnet.sim.hardware import HardwareProfile

    document = _load(file)
    if document.profile is None:
        raise ConfigError(f"{file} has too few measured steps for a profile; run `cygnet bench calibrate {file}` again")
    return msgspec.convert(document.profile, HardwareProfile)


def _read(file: Path) -> Measured | None:
    return _load(file).measured if file.exists() else None


def _load(file: Path) -> Document:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Document)
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is no profile of `cygnet bench calibrate`: {error}") from None


def _write(file: Path, document: Document) -> None:
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from None


def _as_row(sample: "Sample") -> tuple[str, int, int, list[tuple[int, int]], int]:
    load = sample.load
    return sample.name, load.tokens, load.sampled, list(load.requests), sample.measured_ns


def _as_sample(row: tuple[str, int, int, list[tuple[int, int]], int]) -> "Sample":
    from cygnet.sim.calibration import Sample
    from cygnet.sim.cost import Load

    name, tokens, sampled, requests, measured_ns = row
    return Sample(Load(tokens, sampled, tuple(requests)), measured_ns, name)


def _engine(model: str, sets: Sequence[str]) -> "LocalEngine":
    from cygnet.base.config import resolve
    from cygnet.engine.runtime.setup import load_engine

    settings = ["kv.memory=1GiB", "kv.host_cache=off", "engine.audit=off", f"model.model={model}", *sets]
    engine, _ = load_engine(resolve(sets=settings).config)
    return engine


def _machine() -> str:
    from cygnet.cli.machine import read_machine

    machine = read_machine("127.0.0.1", 8000)
    gpus = ", ".join(gpu.name for gpu in machine.gpus)
    return gpus or f"{machine.cpu_model}, {machine.usable_cpus} CPUs"


def _memory_bytes() -> float:
    import psutil

    return float(psutil.virtual_memory().total)


# ----------------------------------------------------------------- measuring


class Meter:
    """Steps an engine, and times what it steps."""

    def __init__(self, engine: "LocalEngine", clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.engine = engine
        self._clock_ns = clock_ns
        self._random = Random(0)
        self._count = 0
        self._plan: StepPlan | None = None
        schedule = engine.core.schedule

        def seen(now_ns: int) -> "StepPlan | None":
            self._plan = schedule(now_ns)
            return self._plan

        engine.core.schedule = seen  # type: ignore[method-assign]

    def tokens(self, count: int) -> list[int]:
        """A prompt that no other one shares anything with."""
        return [self._random.randrange(10, 200_000) for _ in range(count)]

    def add(self, prompt: Sequence[int], output: int) -> str:
        """Send a request; its id."""
        from cygnet.base.messages import AddRequest
        from cygnet.base.sampling import SamplingParams

        self._count += 1
        name = f"calibrate-{self._count}"
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self.engine.add(AddRequest(name, list(prompt), params))
        return name

    def step(self) -> "tuple[StepPlan | None, int]":
        """One step: what it ran, and its nanoseconds."""
        self._plan = None
        start = self._clock_ns()
        self.engine.step()
        return self._plan, self._clock_ns() - start

    def drain(self) -> None:
        """Run what there is to its end."""
        while self.engine.busy:
            self.engine.step()


def measure(engine: "LocalEngine", points: Sequence[Point], seconds: float) -> "list[Sample]":
    """Measure as many kinds of steps as begin within `seconds`. They are taken from all over the grid."""
    meter = Meter(engine)
    end = time.monotonic() + seconds
    for _ in range(2):  # compiled kernels, caches, pages
        meter.add(meter.tokens(600), 8)
        meter.drain()
    samples = []
    chosen = list(points)
    Random(1).shuffle(chosen)
    for point in chosen:
        if time.monotonic() >= end:
            break
        samples += (_decodes if point.batch else _chunks)(meter, point)
    return samples


def _sample(point: Point, steps: "list[tuple[StepPlan, int]]") -> "list[Sample]":
    """The median of steps that were alike; none, where there was no such step."""
    from cygnet.sim.calibration import Sample
    from cygnet.sim.cost import Load

    if not steps:
        return []
    middle = sorted(steps, key=lambda step: step[1])[len(steps) // 2]
    took = round(median(ns for _, ns in steps))
    return [Sample(Load.of(middle[0]), took, point.name)]


def _chunks(meter: Meter, point: Point) -> "list[Sample]":
    """One chunk of a prompt of which a prefix is cached."""
    prefix = meter.tokens(point.prefix)
    if prefix:
        meter.add([*prefix, 5], 1)
        meter.drain()
    steps = []
    for _ in range(ROUNDS):
        meter.add([*prefix, *meter.tokens(point.chunk)], 1)
        plan, took = meter.step()
        meter.drain()
        if plan is not None and [request.num_tokens for request in plan.requests] == [point.chunk]:
            steps.append((plan, took))
    return _sample(point, steps)


def _decodes(meter: Meter, point: Point) -> "list[Sample]":
    """A batch that decodes, alone or with a chunk of a new prompt beside it."""
    for _ in range(point.batch):
        meter.add(meter.tokens(point.context), ENDLESS)
    alike = 0
    while alike < 2:  # all prompts are through, and a step more
        plan, _ = meter.step()
        alike = alike + 1 if plan is not None and plan.num_tokens == point.batch else 0
    steps = []
    for _ in range(ROUNDS if point.chunk else DECODED):
        if point.chunk:
            meter.add(meter.tokens(point.chunk), 1)
        plan, took = meter.step()
        if plan is not None and plan.num_tokens == point.batch + point.chunk:
            steps.append((plan, took))
    meter.engine.abort([str(name) for name in meter.engine.core.running])
    meter.drain()
    return _sample(point, steps)


# ------------------------------------------------------------------- output


def _print(console: Any, profile: "HardwareProfile", samples: "Sequence[Sample]", off: Sequence[float]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for title in ("step", "measured ms", "predicted ms", "off"):
        table.add_column(title, justify="left" if title == "step" else "right")
    for sample, error in zip(samples, off, strict=True):
        took = sample.measured_ns / 1e6
        table.add_row(sample.name, f"{took:,.1f}", f"{took * (1 + error):,.1f}", f"{100 * error:+.0f} %")
    console.print(table)
    found = profile.calibration
    assert found is not None
    console.print(
        f"{found.num_samples} kinds of steps; left out of a fit, each in its turn, they are off by "
        f"{100 * found.median_error:.0f} % in the median, {100 * found.p90_error:.0f} % at P90\n"
        f"products {profile.flops_16bit / 1e9:,.0f} GFLOP/s, attention "
        f"{profile.flops_16bit * profile.attention_efficiency / 1e9:,.0f} GFLOP/s, weights "
        f"{profile.memory_bandwidth / 1e9:,.1f} GB/s, KV {profile.memory_bandwidth * profile.kv_efficiency / 1e9:,.1f} "
        f"GB/s, LM head {profile.head_speed:.1f} times as fast, overlap {profile.overlap:.2f}, "
        f"{profile.step_overhead_ns / 1e6:.2f} ms a step, "
        f"{profile.request_overhead_ns / 1e6:.3f} ms a request",
        markup=False,
    )
