"""How the engine's cost grows with the context and with the batch, beside the law it should follow.

    python benchmarks/engine_growth.py [--quick] [--rounds N] [--threads N] [--json FILE] [--plot FILE.png]

Three curves, Gemma 3 270M with the compiled kernels, steps as the model runner does them:

    decode, 8 sequences     context 1K ... 64K     law: a step at 1K + reading the added keys of the full layers
    prefill, 1,024 tokens   prefix 0 ... 63K       law: the first chunk + the added products of the full layers
    decode at 512 tokens    batch 1 ... 64         law: the longer of reading everything once and multiplying it

Laws are straight lines whose slopes come from the hardware's limits, probed in the run, so a curve that bends away, or
is steeper than the machine explains, shows. Sliding-window layers add nothing to the first two.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from cpu_step import Point, Subject
from cygnet.base.threads import usable_cpus
from engine_limits import Limits, ModelWork
from provenance import environment

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CHUNK = 1024


@dataclass
class Curve:
    """Milliseconds of a step at each size, and what the law says."""

    name: str
    size: str
    sizes: list[int]
    measured: list[float]
    law: list[float]


def decode_by_context(subject: Subject, limits: Limits, work: ModelWork, contexts: list[int], rounds: int) -> Curve:
    measured = []
    for context in contexts:
        point = Point(f"decode b8 @{context}", 8, context, steps=4)
        measured.append(1e3 * median(time for _ in range(rounds) for time in subject.run(point)))
    added = [limits.seconds(work.decode(8, context)) for context in contexts]
    law = [measured[0] + 1e3 * (seconds - added[0]) for seconds in added]
    return Curve("decode of 8 sequences", "context", contexts, measured, law)


def prefill_by_prefix(subject: Subject, limits: Limits, work: ModelWork, contexts: list[int], rounds: int) -> Curve:
    """The last chunk of each context, timed within one long prefill."""
    longest = Point("prefill", 1, contexts[-1], prefill=True)
    chunks = [subject.chunk_times(longest) for _ in range(rounds)]
    places = [context // CHUNK - 1 for context in contexts]
    measured = [1e3 * median(times[place] for times in chunks) for place in places]
    added = [limits.seconds(work.prefill(CHUNK, place * CHUNK)) for place in places]
    law = [measured[0] + 1e3 * (seconds - added[0]) for seconds in added]
    return Curve("prefill of 1,024 tokens", "prefix + 1,024", contexts, measured, law)


def decode_by_batch(subject: Subject, limits: Limits, work: ModelWork, batches: list[int], rounds: int) -> Curve:
    measured = []
    for batch in batches:
        point = Point(f"decode b{batch}", batch, 512, steps=6)
        measured.append(1e3 * median(time for _ in range(rounds) for time in subject.run(point)))
    law = [1e3 * limits.seconds(work.decode(batch, 512)) for batch in batches]
    return Curve("decode at 512 tokens", "batch", batches, measured, law)


def show(curve: Curve) -> None:
    print(f"\n{curve.name}\n{curve.size:>16} {'ms':>9} {'law, ms':>9} {'ratio':>7}")
    for size, measured, law in zip(curve.sizes, curve.measured, curve.law, strict=True):
        print(f"{size:>16,} {measured:>9.1f} {law:>9.1f} {measured / law:>7.2f}", flush=True)


def plot(curves: list[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4.4 * len(curves), 3.6), layout="constrained")
    for axis, curve in zip(axes, curves, strict=True):
        axis.plot(curve.sizes, curve.measured, "o-", label="measured")
        axis.plot(curve.sizes, curve.law, "--", color="grey", label="law")
        axis.set_xscale("log", base=2)
        axis.set_xticks(curve.sizes, [f"{s // 1024}K" if s >= 1024 else str(s) for s in curve.sizes])
        axis.set_ylim(0)
        axis.set_title(curve.name, fontsize=10)
        axis.set_xlabel(curve.size)
        axis.set_ylabel("ms per step")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost against context and batch, beside the expected law.")
    parser.add_argument("--quick", action="store_true", help="contexts up to 4K, batches up to 16, one round")
    parser.add_argument("--rounds", type=int, default=0, help="three unless given (with --quick one)")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves here (.png, .svg)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contexts = list(CONTEXTS[:3] if options.quick else CONTEXTS)
    batches = list(BATCHES[:5] if options.quick else BATCHES)
    rounds = options.rounds or (1 if options.quick else 3)
    points = [Point("", 8, contexts[-1]), Point("", batches[-1], 512)]
    subject = Subject("numba", points, perf_counter)
    limits = Limits.measure(dtype=subject.model.dtype)
    work = ModelWork(subject.model.description, 2, subject.kv_dtype.itemsize)
    curves = []
    for measure, sizes in ((decode_by_context, contexts), (prefill_by_prefix, contexts), (decode_by_batch, batches)):
        curves.append(measure(subject, limits, work, sizes, rounds))
        show(curves[-1])
    if options.json:
        report = {
            "config": {"quick": options.quick, "rounds": rounds},
            "environment": environment(threads=options.threads, GOMP_SPINCOUNT=os.environ.get("GOMP_SPINCOUNT")),
            "limits": vars(limits),
            "results": [vars(curve) for curve in curves],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot:
        plot(curves, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
