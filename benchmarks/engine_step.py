"""Milliseconds of scheduling per decode step (`schedule` + `apply`, no model), by the number of running requests.

    python benchmarks/engine_step.py [--quick] [--json FILE] [--check]

Geometry is Gemma 3 270M's (3 full layers, 15 SWA layers, window 511) with blocks of 16 tokens. Requests have prompts of
500 to 600 tokens, so they cross block boundaries at different steps. Only the processor time of this thread is counted:
what else the machine does is not the scheduler's. `--check` fails when the median at 256 running requests is above
`[engine_step] max_ms_at_256` in `benchmarks/targets.toml`.
"""

import argparse
import json
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from time import thread_time_ns

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.plan import SampledToken, StepPlan, StepResult
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager, KVPolicy
from cygnet.kv.sizing import PoolSizes
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


def loaded_core(running: int, steps: int) -> EngineCore:
    """A core with `running` requests that all decode, and room for `steps` tokens of each."""
    full_blocks = running * (-(-(600 + 2 * steps) // BLOCK) + 1)
    sizes = PoolSizes(BLOCK, full_blocks, running * 40 + 1100, 8192)
    core = EngineCore(
        KVManager(GEOMETRY, sizes, KVPolicy()),
        SchedulerPolicy(max_num_seqs=running, max_num_batched_tokens=16_384),
        fingerprint="bench",
        eos_token_ids=[1],
        vocab_size=VOCAB,
        max_requests=running,
    )
    for index in range(running):
        prompt = [2 + (index * 7919 + i) % (VOCAB - 2) for i in range(500 + index * 100 // running)]
        sampling = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
        core.add(AddRequest(f"cmpl-{index:032x}-0", prompt, sampling), 1)
    now, prefilling = 0, True
    while prefilling:
        now += STEP_NS
        plan = core.schedule(now)
        assert plan is not None
        core.apply(result_of(plan), now)
        prefilling = core.stats().num_waiting > 0 or plan.num_tokens > running
    return core


def result_of(plan: StepPlan) -> StepResult:
    """What a model would answer."""
    token = plan.step % 1000 + 2
    return StepResult(plan.step, {r.request_id: SampledToken(token) for r in plan.requests if r.sample})


def measure(running: int, steps: int) -> Result:
    """Time `steps` decode steps."""
    core = loaded_core(running, steps)
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
        finished = thread_time_ns()
        assert len(outputs) == running
        total.append((scheduled - started + finished - resumed) / 1e6)
        scheduling.append((scheduled - started) / 1e6)
    assert core.stats().preemptions_total == 0
    return Result(running, steps, median(total), quantiles(total, n=100)[98], max(total), median(scheduling))


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
    if options.json:
        report = {
            "config": {"quick": options.quick, "steps": steps, "block_size": BLOCK},
            "environment": environment(),
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return check(results) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
