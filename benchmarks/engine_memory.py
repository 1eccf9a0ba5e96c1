"""Resident memory of the engine over weights and KV cache, and whether it stays flat under a long mixed load.

    python benchmarks/engine_memory.py [--quick] [--steps N] [--json FILE] [--check]

An engine in this process serves requests that share prefixes, branch, end early and are aborted, with chunks and
decodes in one step, so that blocks are cached, evicted and rebuilt. The KV cache fills up in the first steps; from then
on resident memory should not grow.

--check fails when it grows by more than `[engine_memory] max_growth_mib` from the second quarter to the last.
"""

import argparse
import json
import random
import sys
import tomllib
from pathlib import Path
from statistics import median

import psutil
import torch

from cygnet.base.config import resolve
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.base.units import format_bytes
from cygnet.engine.runtime.setup import load_engine
from provenance import environment

TARGETS = Path(__file__).parent / "targets.toml"
SAMPLES = 40
MIB = 1 << 20


class Load:
    """Requests without end: a few shared prefixes, own tails, sessions that go on, some aborted."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = [self._tokens(self._rng.randrange(200, 1200)) for _ in range(6)]
        self._sessions: list[list[int]] = []
        self._count = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, 200_000) for _ in range(count)]

    def next(self) -> AddRequest:
        rng = self._rng
        self._count += 1
        if self._sessions and rng.random() < 0.5:
            prompt = rng.choice(self._sessions) + self._tokens(rng.randrange(1, 60))
        else:
            prompt = rng.choice(self._prefixes) + self._tokens(rng.randrange(1, 200))
        self._sessions = [*self._sessions, prompt][-12:] if len(prompt) < 3000 else []
        sampling = SamplingParams(temperature=rng.choice((0.0, 0.8)), max_tokens=rng.randrange(1, 24), seed=self._count)
        return AddRequest(f"r{self._count}", prompt, sampling)

    def unlucky(self) -> bool:
        return self._rng.random() < 0.1


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def run(steps: int, kv: str) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Samples of memory in bytes, and the parts that are known."""
    empty = resident()
    engine, _ = load_engine(resolve(sets=[f"kv.memory={kv}", "engine.audit=off", "engine.max_num_seqs=8"]).config)
    pool = engine.core.kv.sizes.num_bytes(engine.core.kv.geometry)
    loaded = resident()
    load, samples = Load(0), []
    for step in range(steps):
        while engine.core.num_requests < 12:
            message = load.next()
            engine.add(message)
            if load.unlucky():
                engine.abort([message.request_id])
        engine.step()
        if (step + 1) % max(1, steps // SAMPLES) == 0:
            samples.append({"step": step + 1, "resident": resident()})
            print(f"step {step + 1:>7}: resident {format_bytes(samples[-1]['resident'])}", flush=True)
    engine.check()
    return samples, {"python_and_libraries": empty, "after_loading": loaded, "kv_pool": pool}


def main() -> int:
    parser = argparse.ArgumentParser(description="Resident memory over weights and KV cache, and its growth.")
    parser.add_argument("--quick", action="store_true", help="400 steps instead of 6,000")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--kv", default="256MiB", help="size of the KV cache; it fills up in the first steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--check", action="store_true", help="fail when memory grows")
    options = parser.parse_args()
    steps = options.steps or (400 if options.quick else 6000)
    samples, parts = run(steps, options.kv)
    quarter = max(1, len(samples) // 4)
    second = median(sample["resident"] for sample in samples[quarter : 2 * quarter])
    last = median(sample["resident"] for sample in samples[-quarter:])
    growth = (last - second) / MIB
    print(f"\nPython and libraries {format_bytes(parts['python_and_libraries'])}, with weights and their copies")
    print(f"{format_bytes(parts['after_loading'])}, KV cache {format_bytes(parts['kv_pool'])} once full;")
    over = last - parts["after_loading"] - parts["kv_pool"]
    print(f"at the end {format_bytes(int(last))}, {over / MIB:+.0f} MiB beside those")
    print(f"growth from the second quarter to the last: {growth:+.1f} MiB")
    if options.json:
        config = {"steps": steps, "kv": options.kv}
        report = {
            "config": config,
            "environment": environment(torch=torch.__version__),
            "parts": parts,
            "samples": samples,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.check:
        target = float(tomllib.loads(TARGETS.read_text())["engine_memory"]["max_growth_mib"])
        good = growth <= target
        print(f"{'ok' if good else 'GROWS'}: {growth:.1f} MiB, target {target} MiB")
        return 0 if good else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
