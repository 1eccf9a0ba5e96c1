"""Speed of the simulator: requests, steps and events per second, by the number of simulated workers.

    python benchmarks/simulator.py TRACE [--workers 16 64] [--requests 4000] [--block-size 512] [--json FILE]

TRACE is a trace file, such as Mooncake's conversation_trace.jsonl.gz. Each worker is an H200 with Gemma 3 27B. The
trace is laid over itself as many times as makes its own load on eight workers the same on all of them, repeated as
often as needed, and cut to `--requests`. Counted is processor time, which on one core of an idle machine is real time,
of the simulation and of making its sessions, without reading the trace; and the process's memory at its peak, trace
included: when a quarter of the requests have ended, and at the end.
"""

import argparse
import json
import resource
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from time import process_time

from cygnet.cli.bench.traces import load_trace
from cygnet.cli.simulate import rare_collections
from cygnet.sim.assembly import build
from cygnet.sim.model_table import model_facts
from cygnet.sim.scenario import parse_scenario
from cygnet.sim.sessions import Session
from cygnet.sim.workload import workload
from provenance import environment

LOADED_WORKERS = 8
"""So many workers keep up with the trace's own load; half as many do not."""


@dataclass(frozen=True)
class Result:
    """One run; rates are per second of processor time."""

    workers: int
    requests: int
    output_tokens: int
    seconds: float
    simulated_seconds: float
    requests_per_s: float
    steps_per_s: float
    events_per_s: float
    output_tokens_per_s: float
    effective_hit: float
    evicted_blocks: int
    quarter_mb: float
    peak_mb: float


def peak_mb() -> float:
    """The process's memory at its peak so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(trace: list[Session], workers: int, requests: int, block_size: int) -> Result:
    overlay = max(1, workers // LOADED_WORKERS)
    scenario = parse_scenario(
        f"[fleet]\nworkers = {workers}\ndispatch = 'round_robin'\n[kv]\nblock_size = {block_size}\n"
        f"[workload]\noverlay = {overlay}\ncopies = {-(-requests // (len(trace) * overlay))}\n",
        "benchmark",
    )
    quarter = 0.0

    def look(done: int) -> None:
        nonlocal quarter
        if done == requests // 4:
            quarter = peak_mb()

    simulation = build(scenario, model_facts(scenario.model.name), progress=look)
    with rare_collections():
        start = process_time()
        results = simulation.run(islice(workload(scenario, trace).sessions, requests))
        seconds = process_time() - start
    return Result(
        workers=workers,
        requests=results.finished,
        output_tokens=results.output_tokens,
        seconds=seconds,
        simulated_seconds=results.duration_s,
        requests_per_s=results.finished / seconds,
        steps_per_s=results.steps / seconds,
        events_per_s=simulation.loop.num_events / seconds,
        output_tokens_per_s=results.output_tokens / seconds,
        effective_hit=results.effective_hit,
        evicted_blocks=results.evicted_full_blocks,
        quarter_mb=quarter,
        peak_mb=peak_mb(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = load_trace(args.trace, None)
    print("workers   requests  seconds  requests/s  steps/s  events/s  hit %    evicted  MB at 1/4  MB at the end")
    results = []
    for workers in args.workers:
        result = run(trace, workers, args.requests, args.block_size)
        results.append(result)
        print(
            f"{result.workers:7}  {result.requests:9,}  {result.seconds:7.1f}  {result.requests_per_s:10.0f}  "
            f"{result.steps_per_s:7,.0f}  {result.events_per_s:8,.0f}  {100 * result.effective_hit:5.1f}  "
            f"{result.evicted_blocks:9,}  {result.quarter_mb:9,.0f}  {result.peak_mb:13,.0f}"
        )
    if args.json:
        document = {"environment": environment(block_size=args.block_size), "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
