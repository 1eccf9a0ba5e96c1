"""Milliseconds of scheduling per decode step (`schedule` + `apply`, no model), by the number of running requests; and
of all that the CPU does around a step of 256 requests with 8,192 tokens each.

    python benchmarks/engine_step.py [--quick] [--json FILE] [--check]

Geometry is Gemma 3 270M's (3 full layers, 15 SWA layers, window 511) with blocks of 16 tokens. Requests have prompts of
500 to 600 tokens, so they cross block boundaries at different steps. Only the processor time of this thread is counted:
what else the machine does is not the scheduler's. Around a step there is also: building the batch (block tables, slots,
positions, tokens), taking the chosen tokens, encoding and sending outputs, and, per request that comes in, decoding,
checking and hashing its prompt. The last two are hidden where a GPU works meanwhile; on a CPU nothing is, as there the
model has all cores. `--check` fails when the median at 256 running requests is above
`[engine_step] max_ms_at_256` in `benchmarks/targets.toml`.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import thread_time_ns
from types import SimpleNamespace
from typing import cast

import msgspec
import torch
import zmq

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.messages import AddRequest, EngineInput, StepOutputs
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.engine.runtime.model_runner import ModelRunner
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes
from cygnet.model.batch import ForwardBatch
from cygnet.model.decoder import HybridModel
from provenance import environment

GEOMETRY = KVGeometry(GroupGeometry(3, 1, 256, 256, 2), GroupGeometry(15, 1, 256, 256, 2, 511))
BLOCK = 16
VOCAB = 262_144
STEP_NS = 20_000_000
TARGETS = Path(__file__).parent / "targets.toml"
CHECKED = 256


@dataclass(frozen=True)
class Result:
    """Milliseconds per step; `max` includes the steps that collect garbage."""

    running: int
    steps: int
    median_ms: float
    p99_ms: float
    max_ms: float
    schedule_ms: float
    """Median of `schedule` alone."""


@dataclass(frozen=True)
class Around:
    """Milliseconds of CPU work around a step, medians."""

    running: int
    prompt: int
    schedule: float
    build: float
    take: float
    apply: float
    send: float
    prepare: float
    """Per request of `prompt` tokens that comes in."""

    @property
    def step(self) -> float:
        """All but what comes in."""
        return self.schedule + self.build + self.take + self.apply + self.send


def result_of(plan: StepPlan) -> StepResult:
    """What a model would answer."""
    token = plan.step % 1000 + 2
    return StepResult(plan.step, {r.request_id: SampledToken(token) for r in plan.requests if r.sample})


def loaded_core(
    running: int, steps: int, *, prompt_tokens: int = 500, run: Callable[[StepPlan], StepResult] = result_of
) -> EngineCore:
    """A core with `running` requests that all decode, with prompts of up to 100 tokens more than `prompt_tokens`, and
    room for `steps` tokens of each."""
    full_blocks = running * (-(-(prompt_tokens + 100 + 2 * steps) // BLOCK) + 1)
    sizes = PoolSizes(BLOCK, full_blocks, running * 40 + 1100, prompt_tokens + 8192)
    core = EngineCore(
        KVManager(GEOMETRY, sizes, KVPolicy()),
        SchedulerPolicy(max_num_seqs=running, max_num_batched_tokens=16_384),
        fingerprint="bench",
        eos_token_ids=[1],
        vocab_size=VOCAB,
        max_requests=running,
    )
    for index in range(running):
        prompt = [2 + (index * 7919 + i) % (VOCAB - 2) for i in range(prompt_tokens + index * 100 // running)]
        sampling = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
        core.add(AddRequest(f"cmpl-{index:032x}-0", prompt, sampling), 1)
    now, prefilling = 0, True
    while prefilling:
        now += STEP_NS
        plan = core.schedule(now)
        assert plan is not None
        core.apply(run(plan), now)
        prefilling = core.stats().num_waiting > 0 or plan.num_tokens > running
    return core


def measure(running: int, steps: int, *, followed: bool = False) -> Result:
    """Time `steps` decode steps; `followed`: a router wants to know what the cache holds."""
    core = loaded_core(running, steps)
    core.kv.journal.switch(followed)
    total, scheduling, now = [], [], 10**12
    for _ in range(steps):
        now += STEP_NS
        started = thread_time_ns()
        plan = core.schedule(now)
        scheduled = thread_time_ns()
        assert plan is not None
        assert plan.num_tokens == running
        result = result_of(plan)
        resumed = thread_time_ns()
        outputs = core.apply(result, now)
        core.kv.journal.take()
        finished = thread_time_ns()
        assert len(outputs) == running
        total.append((scheduled - started + finished - resumed) / 1e6)
        scheduling.append((scheduled - started) / 1e6)
    assert core.stats().preemptions_total == 0
    return Result(running, steps, median(total), quantiles(total, n=100)[98], max(total), median(scheduling))


class NoModel:
    """Stands in for a model that takes no time."""

    device = torch.device("cpu")
    description = SimpleNamespace(vocab_size=VOCAB)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.token_ids if batch.wanted is None else batch.token_ids[batch.wanted.rows]

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def measure_around(running: int, prompt_tokens: int, steps: int) -> Around:
    """Time everything but the model in `steps` decode steps."""
    one_layer = KVGeometry(GroupGeometry(1, 1, 1, 1, 2), GroupGeometry(1, 1, 1, 1, 2, GEOMETRY.window))
    pool = DevicePool(one_layer, PoolSizes(BLOCK, 1, 1, 1), dtype=torch.bfloat16, device="cpu")
    runner = ModelRunner(cast(HybridModel, NoModel()), pool, window=GEOMETRY.window, eos_token_ids=())
    core = loaded_core(running, steps, prompt_tokens=prompt_tokens, run=runner.execute)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EngineInput)
    prompt = [2 + i * 31 % (VOCAB - 2) for i in range(prompt_tokens)]
    incoming = encoder.encode(AddRequest(f"cmpl-{0:032x}-1", prompt, SamplingParams(temperature=0.0)))
    times: list[list[int]] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as api:
        api.bind("inproc://step")
        ours.connect("inproc://step")
        for step in range(steps):
            now = 2 * 10**12 + step * STEP_NS
            marks = [thread_time_ns()]
            plan = core.schedule(now)
            marks.append(thread_time_ns())
            assert plan is not None
            pending = runner.launch(plan)
            marks.append(thread_time_ns())
            result = pending.result()
            marks.append(thread_time_ns())
            outputs = core.apply(result, now)
            marks.append(thread_time_ns())
            ours.send(encoder.encode(StepOutputs(outputs)))
            marks.append(thread_time_ns())
            assert len(outputs) == running
            api.recv()
            times.append([after - before for before, after in pairwise(marks)])
    preparing = []
    for _ in range(50):
        begun = thread_time_ns()
        message = decoder.decode(incoming)
        assert isinstance(message, AddRequest)
        core.prepare(message)
        preparing.append(thread_time_ns() - begun)
    phases = [*zip(*times, strict=True), preparing]
    return Around(running, prompt_tokens, *(median(phase) / 1e6 for phase in phases))


def print_around(around: Around) -> None:
    """What takes how long, and what share of it."""
    print(f"\naround a step of {around.running} requests with {around.prompt} tokens each, ms:")
    for name in ("schedule", "build", "take", "apply", "send"):
        value = getattr(around, name)
        print(f"{name:>10} {value:>8.3f} {value / around.step:>6.0%}{'   while a GPU works' if name == 'send' else ''}")
    print(f"{'all':>10} {around.step:>8.3f}")
    print(f"{'prepare':>10} {around.prepare:>8.3f}   per request that comes in, while a GPU works")


def check(results: list[Result]) -> int:
    """Exit status: whether the target is met; says so."""
    target = float(tomllib.loads(TARGETS.read_text())["engine_step"]["max_ms_at_256"])
    measured = next(r.median_ms for r in results if r.running == CHECKED)
    good = measured <= target
    print(f"{'ok' if good else 'TOO SLOW'}: {measured:.3f} ms at {CHECKED} running requests, target {target} ms")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Milliseconds of scheduling per decode step.")
    parser.add_argument("--quick", action="store_true", help="256 running requests only, a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--check", action="store_true", help="fail when the target is missed")
    options = parser.parse_args()
    steps = 200 if options.quick else 1000
    print(f"{'running':>8} {'median ms':>10} {'p99 ms':>8} {'max ms':>8} {'schedule ms':>12} {'us/request':>11}")
    results = []
    for running in (CHECKED,) if options.quick else (1, 16, 64, CHECKED, 1024):
        result = measure(running, steps)
        results.append(result)
        each = 1000 * result.median_ms / running
        print(
            f"{running:>8} {result.median_ms:>10.3f} {result.p99_ms:>8.3f} {result.max_ms:>8.3f} "
            f"{result.schedule_ms:>12.3f} {each:>11.2f}"
        )
    followed = measure(CHECKED, steps, followed=True)
    figures = f"{followed.median_ms:>10.3f} {followed.p99_ms:>8.3f} {followed.max_ms:>8.3f}"
    print(f"{CHECKED:>8} {figures}   with a follower")
    around = measure_around(CHECKED, 8192, steps // 2)
    print_around(around)
    if options.json:
        report = {
            "config": {"quick": options.quick, "steps": steps, "block_size": BLOCK},
            "environment": environment(),
            "results": [asdict(result) for result in results],
            "followed": asdict(followed),
            "around_ms": asdict(around),
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return check(results) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
