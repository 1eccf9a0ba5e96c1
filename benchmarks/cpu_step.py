"""Tokens per second of prefill and decode steps on CPUs, with several ways to run them, beside the hardware's limits.

    python benchmarks/cpu_step.py [--quick] [--json FILE] [--threads N] [--cpu-time]
                                  [--variants NAME ...] [--points NAME ...]

A step is what the engine's model runner does: block tables, forward pass, LM head, greedy choice. The scheduler is left
out. KV of earlier tokens is random. Variants take turns, round by round; figures are medians. `limit` is the longer
of reading (weights once a step, KV of every sequence) at the measured bandwidth and multiplying at the measured rate.

`--cpu-time` counts CPU seconds instead, which with `--threads 1` says something even where other work comes and goes.
Set GOMP_SPINCOUNT=10000 on a machine that others use too, as `cygnet serve` does.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from cygnet.base.config import Config
from cygnet.base.ids import BlockId, RequestId
from cygnet.base.sampling import SamplingParams
from cygnet.base.threads import usable_cpus
from cygnet.engine.plan import NewRequest, ScheduledRequest, StepPlan
from cygnet.engine.runtime.model_runner import ModelRunner
from cygnet.engine.runtime.setup import choose_kv_dtype, choose_weights
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from cygnet.model.source import find_model
from engine_limits import Limits, ModelWork
from provenance import environment

BLOCK, CHUNK = 16, 1024
SWA_BLOCKS = 1200
GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "torch": {"attention_backend": "torch", "step_kernels": "torch"},
    "numba": {"attention_backend": "numba", "step_kernels": "numba"},
    "int8": {"attention_backend": "numba", "step_kernels": "numba", "int8": True},
}


@dataclass(frozen=True)
class Point:
    """One kind of work: `batch` sequences at `context` tokens decode, or one prompt of `context` is prefilled."""

    name: str
    batch: int
    context: int
    prefill: bool = False
    steps: int = 10
    """Decode steps per round."""


POINTS = [
    Point("decode b1 @512", 1, 512, steps=20),
    Point("decode b8 @512", 8, 512),
    Point("decode b32 @512", 32, 512, steps=5),
    Point("decode b8 @8K", 8, 8192),
    Point("prefill 512", 1, 512, prefill=True),
    Point("prefill 4K", 1, 4096, prefill=True),
    Point("prefill 16K", 1, 16384, prefill=True),
]
QUICK = [point for point in POINTS if point.context <= 512]


class Subject:
    """One variant, loaded, with KV pools of its own that hold random numbers."""

    def __init__(self, name: str, points: list[Point], clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        kinds = choose_weights(Config(), torch.device("cpu"))
        dtype = kinds.dtype
        checkpoint = find_model("gemma3-270m").checkpoint(dtype=dtype)
        matrices = kinds.matrices if name == "numba" else None  # torch has no matrices in bf16 beside fp32
        self.model: HybridModel = build_model(
            checkpoint, dtype=dtype, weight_dtype=matrices, pack_tied_head=True, **VARIANTS[name]
        )
        self.kv_dtype = choose_kv_dtype(Config(), self.model)
        self.geometry = self.model.description.kv_geometry(self.kv_dtype.itemsize)
        blocks = max(point.batch * (point.context // BLOCK + 32) for point in points)
        sizes = PoolSizes(BLOCK, blocks, SWA_BLOCKS, 1 << 20)
        self.pool = DevicePool(self.geometry, sizes, dtype=self.kv_dtype, device="cpu")
        for layer in self.pool.full + self.pool.swa:
            layer.key.normal_()
            layer.value.normal_()
        self._count = 0

    def run(self, point: Point) -> list[float]:
        """Seconds per step (decode) or of the whole prompt (prefill)."""
        window = self.geometry.window
        runner = ModelRunner(self.model, self.pool, window=window, eos_token_ids=())
        return [sum(self._prefill(runner, point))] if point.prefill else self._decode(runner, point)

    def _new(self, point: Point) -> NewRequest:
        self._count += 1
        tokens = tuple((self._count * 7919 + i * 31) % 200_000 + 10 for i in range(point.context))
        return NewRequest(RequestId(f"r{self._count}"), tokens, point.context, GREEDY, 0, 0, 0)

    def chunk_times(self, point: Point) -> list[float]:
        """Seconds of each chunk of a prompt."""
        return self._prefill(ModelRunner(self.model, self.pool, window=self.geometry.window, eos_token_ids=()), point)

    def _prefill(self, runner: ModelRunner, point: Point) -> list[float]:
        new = self._new(point)
        blocks = tuple(BlockId(b) for b in range(point.context // BLOCK))
        times = []
        for start in range(0, point.context, CHUNK):
            started = self._clock()
            count, first = min(CHUNK, point.context - start), start == 0
            table, last = blocks if first else (), start + count == point.context
            swa = tuple(BlockId(b % SWA_BLOCKS) for b in table)
            request = ScheduledRequest(new.request_id, start, count, 0, table, 0, swa, last)
            runner.execute(StepPlan(0, (), (new,) if first else (), (request,)))
            times.append(self._clock() - started)
        return times

    def _decode(self, runner: ModelRunner, point: Point) -> list[float]:
        news = [self._new(point) for _ in range(point.batch)]
        per_request = point.context // BLOCK + 4
        first_swa = max(0, point.context - 1 - self.geometry.window) // BLOCK
        order = torch.randperm(point.batch * per_request, generator=torch.Generator().manual_seed(0)).tolist()
        times = []
        for step in range(point.steps + 1):
            requests = []
            for r, new in enumerate(news):
                full: tuple[BlockId, ...] = ()
                swa: tuple[BlockId, ...] = ()
                if step == 0:
                    full = tuple(BlockId(b) for b in order[r * per_request : (r + 1) * per_request])
                    width = per_request - first_swa
                    swa = tuple(BlockId(b) for b in range(r * width, (r + 1) * width))
                start = point.context - 1 + step
                requests.append(ScheduledRequest(new.request_id, start, 1, 0, full, first_swa, swa, True))
            plan = StepPlan(step, (), tuple(news) if step == 0 else (), tuple(requests))
            started = self._clock()
            runner.execute(plan)
            times.append(self._clock() - started)
        return times[1:]


def limit_of(limits: Limits, work: ModelWork, point: Point) -> float:
    """The most tokens per second that reading and multiplying allow."""
    if point.prefill:
        return point.context / limits.seconds(work.prefill(point.context))
    return point.batch / limits.seconds(work.decode(point.batch, point.context))


def measure(
    subjects: list[Subject], points: list[Point], rounds: int, clock: Callable[[], float]
) -> list[dict[str, object]]:
    """Rounds of all variants in turn, per point; prints a line per point."""
    results: list[dict[str, object]] = []
    work = ModelWork(subjects[0].model.description)
    width = max(10, *(len(subject.name) for subject in subjects))
    print(f"{'tok/s':<16}" + "".join(f"{s.name:>{width + 2}}" for s in subjects) + f"{'limit':>10}", flush=True)
    for point in points:
        times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
        limits = []
        for _ in range(rounds):
            limits.append(Limits.measure(clock, subjects[0].model.dtype))
            for subject in subjects:
                times[subject.name].append(statistics.median(subject.run(point)))
        done = point.context if point.prefill else point.batch
        rates = {name: done / statistics.median(taken) for name, taken in times.items()}
        limit = statistics.median(limit_of(measured, work, point) for measured in limits)
        print(
            f"{point.name:<16}" + "".join(f"{rate:>{width + 2}.1f}" for rate in rates.values()) + f"{limit:>10.0f}",
            flush=True,
        )
        results.append({"point": point.name, "tokens_per_s": rates, "limit": limit, "seconds": times})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens per second of prefill and decode steps on CPUs.")
    parser.add_argument("--quick", action="store_true", help="contexts of 512 tokens only, three rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds, of all threads together")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--points", nargs="+", metavar="NAME", help="only points whose name contains one of these")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    points = QUICK if options.quick else POINTS
    if options.points:
        points = [point for point in points if any(part in point.name for part in options.points)]
    clock = process_time if options.cpu_time else perf_counter
    subjects = [Subject(name, points, clock) for name in options.variants]
    results = measure(subjects, points, options.rounds or (3 if options.quick else 5), clock)
    if options.json:
        config = {"cpu_time": options.cpu_time, "variants": options.variants, "quick": options.quick}
        report = {
            "config": config,
            "environment": environment(
                torch=torch.__version__, threads=options.threads, GOMP_SPINCOUNT=os.environ.get("GOMP_SPINCOUNT")
            ),
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
