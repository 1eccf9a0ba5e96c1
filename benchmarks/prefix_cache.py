"""Prefix caches at equal KV bytes: hit rates on public traces, with MiMo-V2.5-Pro's geometry and without a model.

    python benchmarks/prefix_cache.py [--quick] [--traces NAME ...] [--systems TEXT ...] [--part X] [--jobs N]
                                      [--seeds N] [--json FILE] [--plot FILE.png] [--check]

A hit is a prompt token that is not computed again. Requests start when the trace says so (agentic sessions: a Poisson
process of starts), or wait for room; they hold their KV for as long as they decode. Time is virtual. Compared are

    uniform LRU        one pool in which all 70 layers keep every token, least recently used first
    last window LRU    two pools; of the sliding-window layers only the window at a request's end is kept
    ours: ...          the same pools, evicted by worth, and then one retention rule after the other
    Cygnet             all of it, and lost windows rebuilt from full KV
    vllm, sglang       their own KVCacheManager and UnifiedRadixCache, as libraries (`make peers ARGS="vllm sglang"`)
    infinite           everything that was ever computed, which nothing can exceed

All work in blocks of 128 tokens, and all requests take 2,048 tokens at a time. SGLang's two pools have Cygnet's sizes;
vLLM takes both kinds of blocks from one pool. Budgets are parts of what the full-attention KV of the whole trace
weighs. Between them Cygnet is run at budgets that shrink by a tenth, to look for cliffs. Its eviction samples its
candidates, and of few hits chance makes many or few: Cygnet's figures are means over seeds.

The traces are read from ../shared/traces or, where that is not, from the sample in `benchmarks/data`. `--check`
compares with `[prefix_cache]` in targets.toml; what a run lacks the figures for is not judged.
"""

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from cygnet.base.threads import usable_cpus
from cygnet.kv.policy import KVPolicy
from peers import ROOT as PEERS
from prefix_replay import replay
from prefix_systems import BLOCK, CHUNK, PRO, UNIFORM, CygnetCache, InfiniteCache, System
from prefix_traces import AGENTIC, MOONCAKE, Request, find, load
from provenance import environment
from worker_process import Worker

HERE = Path(__file__).parent
TARGETS = HERE / "targets.toml"
RULES = ("response_end", "prompt_end", "branch", "message", "geometric")
OURS, INFINITE = "Cygnet", "infinite"
PEER_NAMES = ("vllm", "sglang")
TENTH = 0.9
GB = 1e9
GEOMETRY = {
    "full_layers": PRO.full.num_layers,
    "swa_layers": PRO.swa.num_layers,
    "num_kv_heads": PRO.full.num_kv_heads,
    "key_dim": PRO.full.key_dim,
    "value_dim": PRO.full.value_dim,
    "window": PRO.window,
}


@dataclass(frozen=True)
class Load:
    """What is replayed of a trace. `session_tokens`: Cygnet's setting of that name, the length of a usual session."""

    trace: str
    limit: int
    session_tokens: int
    parts: tuple[float, ...]
    """Budgets, as parts of the whole trace's full-attention KV."""


PARTS = (1 / 10, 1 / 5, 2 / 5, 4 / 5, 8 / 5)
LOADS = [Load(AGENTIC, 20, 65536, PARTS), Load(MOONCAKE, 2500, 8192, PARTS)]
QUICK = [Load(AGENTIC, 6, 65536, PARTS[1:3]), Load(MOONCAKE, 1000, 8192, PARTS[1:3])]


def systems() -> list[System]:
    """Those made of Cygnet's code; each from `ours` on adds one thing to the one before."""
    found = [
        System("uniform LRU", KVPolicy(rebuild=False, retention=(), eviction="lru"), UNIFORM),
        System("last window LRU", KVPolicy(rebuild=False, retention=RULES[:1], eviction="lru")),
        System("ours: by worth", KVPolicy(rebuild=False, retention=RULES[:1])),
    ]
    for count in range(2, len(RULES) + 1):
        found.append(System(f"ours: + {RULES[count - 1]}", KVPolicy(rebuild=False, retention=RULES[:count])))
    return [*found, System(OURS, KVPolicy(retention=RULES))]


@dataclass
class Measured:
    """A system's replay of a trace at a budget. `facts`: see `Totals`."""

    trace: str
    system: str
    budget_bytes: int
    facts: dict[str, float]
    seconds: float = 0.0
    spread: tuple[float, float] = (0.0, 0.0)
    """Lowest and highest hit rate of the seeds."""
    extra: bool = False
    """Run only to look for cliffs."""

    @property
    def hit_rate(self) -> float:
        return self.facts["hit_rate"]


@cache
def requests_of(trace: str, limit: int) -> list[Request]:
    return load(trace, limit)


def run_ours(load_: Load, system: System, budget_bytes: int, seeds: int, extra: bool) -> Measured:
    """Means over seeds."""
    started = time.perf_counter()
    found = []
    for seed in range(seeds):
        seeded = replace(system, policy=replace(system.policy, seed=seed))
        subject = CygnetCache(seeded, budget_bytes, load_.session_tokens)
        found.append(replay(requests_of(load_.trace, load_.limit), subject).facts())
        if faults := subject.manager.audit():
            raise RuntimeError(f"{system.name} on {load_.trace}: {faults[:3]}")
    facts = {name: fmean(facts[name] for facts in found) for name in found[0]}
    rates = [facts["hit_rate"] for facts in found]
    seconds = (time.perf_counter() - started) / seeds
    return Measured(load_.trace, system.name, budget_bytes, facts, seconds, (min(rates), max(rates)), extra)


def tenths(budgets: list[int]) -> list[int]:
    """Budgets from the largest down, each a tenth smaller, as far as the smallest."""
    found = [max(budgets)]
    while found[-1] * TENTH > min(budgets):
        found.append(int(found[-1] * TENTH))
    return found


def start_peer(name: str) -> Worker | None:
    """The peer's worker, if its environment is there."""
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        print(f"{name}: not installed (`make peers ARGS={name}` does), left out", flush=True)
        return None
    logs = PEERS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    script = HERE / "engine_workers" / f"cache_{name}.py"
    variables = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return Worker(name, [python, script], variables, logs / f"cache_{name}.log")


def run_peer(worker: Worker, load_: Load, budget_bytes: int) -> Measured:
    """The peer's own cache over the same requests, in its environment."""
    sized: dict[str, object] = {"budget_bytes": budget_bytes, "geometry": GEOMETRY}
    if worker.name == "sglang":
        pools = CygnetCache(System("", KVPolicy()), budget_bytes, load_.session_tokens).sizes
        sized = {"full_blocks": pools.full_blocks, "swa_blocks": pools.swa_blocks}
    started = time.perf_counter()
    facts = worker.ask("replay", trace=load_.trace, limit=load_.limit, block=BLOCK, chunk=CHUNK, **sized)
    return Measured(load_.trace, worker.name, budget_bytes, facts, time.perf_counter() - started)


def measure(
    load_: Load, chosen: Callable[[str], bool], jobs: int, seeds: int, peers: Iterable[Worker]
) -> list[Measured]:
    """Everything of one trace; the infinite cache first."""
    infinite = InfiniteCache()
    started = time.perf_counter()
    requests = requests_of(load_.trace, load_.limit)
    facts = replay(requests, infinite).facts()
    whole = infinite.num_blocks * PRO.full.block_bytes(BLOCK)
    results = [Measured(load_.trace, INFINITE, whole, facts, time.perf_counter() - started)]
    print(
        f"\n{load_.trace}: {len(requests):,} requests, {facts['prompt'] / 1e6:,.0f}M prompt tokens, from "
        f"{find(load_.trace)}; the whole trace's full-attention KV weighs {whole / GB:,.0f} GB",
        flush=True,
    )
    budgets = [int(whole * part) for part in load_.parts]
    extra = [budget for budget in tenths(budgets) if budget not in budgets] if chosen(OURS) else []
    # Forked, so that the trace is read once.
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        tasks: list[Future[Measured]] = [
            pool.submit(run_ours, load_, system, budget, seeds if system.name == OURS else 1, False)
            for budget in budgets
            for system in systems()
            if chosen(system.name)
        ]
        ours = next(system for system in systems() if system.name == OURS)
        tasks += [pool.submit(run_ours, load_, ours, budget, seeds, True) for budget in extra]
        try:
            theirs = [run_peer(worker, load_, budget) for worker in peers for budget in budgets]
            return [*results, *(task.result() for task in tasks), *theirs]
        finally:
            pool.shutdown(cancel_futures=True)


def print_table(results: list[Measured]) -> None:
    limit = results[0]
    print(
        f"\n{'budget':>9}  {'system':<22}{'hits':>8}{'of infinite':>13}{'M computed again':>18}{'lost to windows':>17}"
        f"{'replayed':>10}{'waited':>8}{'too long':>10}"
    )
    for budget in sorted({r.budget_bytes for r in results[1:] if not r.extra}):
        for r in (r for r in results[1:] if r.budget_bytes == budget and not r.extra):
            again = limit.facts["reused"] - r.facts["reused"]
            print(
                f"{budget / GB:>6,.0f} GB  {r.system:<22}{r.hit_rate:>8.2%}{r.hit_rate / limit.hit_rate:>13.1%}"
                f"{again / 1e6:>18,.1f}{r.facts['lost_windows'] / 1e6:>17,.1f}{r.facts['replayed'] / 1e6:>10,.1f}"
                f"{r.facts['waited']:>8,.0f}{r.facts['refused']:>10,.0f}"
            )
    print(f"{'':>9}  {INFINITE:<22}{limit.hit_rate:>8.2%}{1:>13.1%}", flush=True)


@dataclass(frozen=True)
class Verdict:
    """One target and what was measured; `good` is `None` where the run lacks the figures."""

    what: str
    good: bool | None
    figures: str


def judge(trace: str, results: list[Measured], targets: dict[str, float]) -> list[Verdict]:
    """The targets that concern a trace."""
    limit = results[0].hit_rate
    ours = sorted((r for r in results if r.system == OURS), key=lambda r: r.budget_bytes)
    rate = {r.budget_bytes: r.hit_rate for r in ours}
    verdicts = []
    for name in PEER_NAMES:
        pairs = [(rate[r.budget_bytes], r) for r in results if r.system == name and r.budget_bytes in rate]
        least = min(pairs, key=lambda pair: pair[0] - pair[1].hit_rate, default=None)
        figures = f"closest {least[0]:.2%} to {least[1].hit_rate:.2%}" if least else "not run"
        good = least[0] >= targets["min_of_peer"] * least[1].hit_rate if least else None
        verdicts.append(Verdict(f"{trace}: at least {name} at every budget", good, figures))
    short = [r for r in results if r.system == "uniform LRU" and r.hit_rate <= targets["uniform_of_infinite"] * limit]
    best = max((r for r in short if r.budget_bytes in rate), key=lambda r: rate[r.budget_bytes], default=None)
    share = rate[best.budget_bytes] / limit if best else 0.0
    where = f"{share:.1%} where it has {best.hit_rate / limit:.1%} ({best.budget_bytes / GB:,.0f} GB)" if best else ""
    verdicts.append(
        Verdict(
            f"{trace}: {targets['min_of_infinite']:.0%} of the infinite cache's hits where a uniform pool has at most "
            f"{targets['uniform_of_infinite']:.0%}",
            share >= targets["min_of_infinite"] if best else None,
            where or "not run",
        )
    )
    steps = [
        (1 - small.hit_rate / large.hit_rate, large)
        for small, large in pairwise(ours)
        if large.hit_rate and small.budget_bytes >= TENTH * large.budget_bytes - 1
    ]
    worst = max(steps, key=lambda step: step[0], default=None)
    verdicts.append(
        Verdict(
            f"{trace}: a budget 10% smaller costs at most {targets['max_loss_per_tenth']:.0%} of the hits",
            worst[0] <= targets["max_loss_per_tenth"] if worst else None,
            f"worst {worst[0]:.1%}, below {worst[1].budget_bytes / GB:,.0f} GB" if worst else "not run",
        )
    )
    if trace == AGENTIC:
        enough = next((r for r in ours if r.hit_rate >= targets["min_agentic"]), None)
        verdicts.append(
            Verdict(
                f"{trace}: {targets['min_agentic']:.0%} of all prompt tokens hit at some budget",
                enough is not None if ours else None,
                f"{enough.hit_rate:.2%} from {enough.budget_bytes / GB:,.0f} GB on" if enough else "at none",
            )
        )
    return verdicts


def check(verdicts: Iterable[Verdict]) -> int:
    """Exit status: whether every target that could be judged is met; says of each."""
    missed = 0
    for verdict in verdicts:
        word = "not judged" if verdict.good is None else "ok" if verdict.good else "MISSED"
        print(f"{word}: {verdict.what}: {verdict.figures}")
        missed += verdict.good is False
    return 1 if missed else 0


def plot(results: dict[str, list[Measured]], path: Path) -> None:
    """Hit rates over the budget, a panel for each trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(6 * len(results), 4.2), layout="constrained", squeeze=False
    )
    for axes, (trace, measured) in zip(panels[0], results.items(), strict=True):
        for name in dict.fromkeys(r.system for r in measured[1:]):
            points = sorted((r.budget_bytes / GB, 100 * r.hit_rate) for r in measured[1:] if r.system == name)
            width = 2.4 if name == OURS else 1.2
            axes.plot(*zip(*points, strict=True), marker="." if name != OURS else "", linewidth=width, label=name)
        axes.axhline(100 * measured[0].hit_rate, color="black", linewidth=0.8, linestyle="--", label=INFINITE)
        budgets = sorted({r.budget_bytes / GB for r in measured[1:] if not r.extra})
        axes.set_xscale("log")
        axes.set_xticks(budgets, [f"{budget:,.0f}" for budget in budgets])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(title=trace, xlabel="KV bytes, GB", ylabel="prompt tokens not computed again, %")
    panels[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def report(results: dict[str, list[Measured]], facts: dict[str, Any], options: argparse.Namespace) -> dict[str, object]:
    return {
        "config": {
            "quick": options.quick,
            "part": options.part,
            "seeds": options.seeds,
            "block_size": BLOCK,
            "chunk": CHUNK,
            "geometry": GEOMETRY,
        },
        "environment": environment(peers=facts),
        "results": [
            {
                "trace": r.trace,
                "system": r.system,
                "budget_bytes": r.budget_bytes,
                "seconds": r.seconds,
                "spread": r.spread,
                **r.facts,
            }
            for measured in results.values()
            for r in measured
        ],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prefix caches at equal KV bytes, on public traces.")
    parser.add_argument("--quick", action="store_true", help="less of the traces, without peers: under a minute")
    parser.add_argument("--traces", nargs="+", choices=(AGENTIC, MOONCAKE), default=(AGENTIC, MOONCAKE))
    parser.add_argument("--systems", nargs="+", metavar="TEXT", help="only those whose name contains one of these")
    parser.add_argument("--part", type=float, default=1.0, metavar="X", help="replay only this part of what is usual")
    parser.add_argument("--jobs", type=int, default=usable_cpus(), help="replays at once")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="runs of Cygnet at each budget [3; quick: 1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results here (.png, .svg)")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.quick else 3)
    return options


def main() -> int:
    options = parse()

    def chosen(name: str) -> bool:
        return not options.systems or any(text in name for text in options.systems)

    targets: dict[str, float] = tomllib.loads(TARGETS.read_text())["prefix_cache"]
    results: dict[str, list[Measured]] = {}
    started, facts, verdicts = time.perf_counter(), {}, []
    workers = [] if options.quick else [w for name in PEER_NAMES if chosen(name) and (w := start_peer(name))]
    try:
        for usual in (one for one in (QUICK if options.quick else LOADS) if one.trace in options.traces):
            load_ = replace(usual, limit=max(1, round(usual.limit * options.part)))
            results[load_.trace] = measured = measure(load_, chosen, options.jobs, options.seeds, workers)
            print_table(measured)
            verdicts += judge(load_.trace, measured, targets)
        facts = {worker.name: worker.ask("facts") for worker in workers}
    finally:
        for worker in workers:
            worker.close()
    print(f"\n{time.perf_counter() - started:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(report(results, facts, options), indent=2) + "\n")
    if options.plot:
        plot(results, options.plot)
    return check(verdicts) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
