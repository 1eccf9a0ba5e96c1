"""Cygnet's engine beside transformers, vLLM and llama.cpp, on this machine's CPUs, with the same weights and prompts.

    python benchmarks/engine.py [--quick] [--engines NAME ...] [--rows TEXT ...] [--rounds N] [--threads N]
                                [--json FILE] [--plot FILE.png] [--check]

`make peers` installs the others; those that are not there are left out. Every engine is a process of its own with the
model loaded once (`engine_workers/`). Row by row the engines take turns, round by round, in an order that rotates;
figures are medians. `limit` is what the memory bandwidth and the GEMM rate allow, probed between the rounds.

vLLM is called as a library (no server, no text) like Cygnet. transformers and llama.cpp are left out of rows that take
them minutes a round: transformers' long prefills and eight sequences of 8K, llama.cpp's four users (it prefills the
shared prefix again in three of four slots).

On a CPU without bf16 arithmetic vLLM and transformers run in float32, which is several times as fast there as bf16 that
is emulated. So does Cygnet, with its matrices in bf16; llama.cpp decides for itself.

Prompts are token ids made from a counter: equal for all engines within a round, and new in each round where nothing may
be cached. llama.cpp's prefill and decodes up to 1K are those of its own `llama-batched-bench` (the model alone: no
sampling, no server); everything else counts the engine's scheduling and sampling too.

--check compares with targets.toml, where each target is a ratio to the best peer of this run; one missed is a failure.
"""

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cygnet.base.threads import usable_cpus
from cygnet.engine.runtime.setup import choose_dtype
from cygnet.model.description import ModelDescription
from cygnet.model.registry import describe as describe_model
from cygnet.model.source import find_model
from engine_limits import Limits, ModelWork
from peers import ROOT as PEERS
from provenance import environment
from worker_process import SPIN_COUNT, Worker

HERE = Path(__file__).parent
TARGETS = HERE / "targets.toml"
VOCAB = 200_000
WARMED = 8192
"""Rows of up to this context have a round before the first that counts."""


@dataclass(frozen=True)
class Row:
    """One kind of work. `op` and the sizes are what a worker is asked; less is better, but for a `unit` of tok/s."""

    name: str
    op: str
    context: int
    batch: int = 1
    steps: int = 1
    tail: int = 0
    """Tokens behind a shared prefix of `context` tokens, which is cached; each prompt has its own."""
    rounds: int = 5
    engines: tuple[str, ...] = ("cygnet", "transformers", "vllm", "llama.cpp")
    quick: bool = False
    unit: str = "tok/s"
    weight_bytes: float = 2.0
    """Of the limit."""

    @property
    def less_is_better(self) -> bool:
        return self.unit != "tok/s"

    def value(self, seconds: float) -> float:
        """The figure that `seconds` mean: the worker's answer is per step for decodes, else for all."""
        if self.less_is_better:
            return seconds
        return (self.context if self.op == "prefill" else self.batch) / seconds

    def limit(self, limits: Limits, work: ModelWork) -> float:
        """The figure that the machine's limits allow."""
        if self.op == "held":
            return self.batch * work.description.kv_geometry(2).cached_bytes(self.context) / (1 << 20)
        if self.op == "prefill":
            return self.value(limits.seconds(work.prefill(self.context)))
        if self.op == "decode":
            return self.value(limits.seconds(work.decode(self.batch, self.context)))
        steps = (self.steps - 1) * limits.seconds(work.decode(self.batch, self.context + self.tail))
        return self.batch * limits.seconds(work.prefill(self.tail, self.context)) + steps


WITH_CACHE = ("cygnet", "vllm", "llama.cpp")
BYTES = ("cygnet-int8", "llama.cpp-q4")
ROWS = [
    Row("prefill 512", "prefill", 512, quick=True),
    Row("prefill 4K", "prefill", 4096),
    Row("prefill 16K", "prefill", 16384, engines=("cygnet", "vllm", "llama.cpp")),
    Row("prefill 32K", "prefill", 32000, rounds=3, engines=("cygnet", "vllm")),
    Row("KV of 16 sessions of 32K", "held", 32000, 16, rounds=1, engines=("cygnet", "vllm"), unit="MiB"),
    Row("decode b1 @512", "decode", 512, 1, steps=32, quick=True),
    Row("decode b1 @512, 8-bit or less", "decode", 512, 1, steps=32, engines=BYTES, weight_bytes=1.0, quick=True),
    Row("decode b8 @512", "decode", 512, 8, steps=16, quick=True),
    Row("decode b32 @512", "decode", 512, 32, steps=8, quick=True),
    Row("decode b8 @8K", "decode", 8192, 8, steps=12, engines=WITH_CACHE),
    Row("8K cached + 200: first token", "first_token", 8192, 1, tail=200, unit="s", engines=WITH_CACHE),
    Row(
        "4 users, same 8K + 200, 16 tokens", "first_token", 8192, 4, 16, tail=200, unit="s", engines=("cygnet", "vllm")
    ),
]


class Prompts:
    """Token ids that no two calls share a prefix of, the same for everybody who asks for the same name."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def get(self, name: str, tokens: int) -> list[int]:
        seed = self._made.setdefault(name, len(self._made) + 1)
        return [(seed * 7919 + i * 31 + (i * i) % 1009) % VOCAB + 10 for i in range(tokens)]


@cache
def arithmetic() -> torch.dtype:
    """What engines compute in: bf16, or fp32 where the CPU can't multiply bf16."""
    return choose_dtype("auto", torch.device("cpu"))


def commands(threads: int) -> dict[str, list[str | Path]]:
    """How each engine's worker is started."""
    workers, models = HERE / "engine_workers", PEERS / "models"
    llama = (workers / "run_llamacpp.py", "--threads", str(threads), "--bin", PEERS / "llamacpp" / "bin", "--model")
    ours = (sys.executable, workers / "run_cygnet.py", "--threads", str(threads), "--kv")
    hf = ("--model", models / "gemma3-270m", "--dtype", str(arithmetic()).removeprefix("torch."))
    return {
        "cygnet": [*ours, "2GiB"],
        "cygnet-int8": [*ours, "512MiB", "--weight-dtype", "int8"],
        "transformers": [sys.executable, workers / "run_transformers.py", "--threads", str(threads), *hf],
        "vllm": [PEERS / "vllm/bin/python", workers / "run_vllm.py", "--threads", str(threads), *hf],
        "llama.cpp": [sys.executable, *llama, models / "gemma3-270m-bf16.gguf"],
        "llama.cpp-q4": [sys.executable, *llama, models / "gemma3-270m-q4_k_m.gguf"],
    }


def missing(name: str) -> bool:
    """Whether an engine's files are not there."""
    needed = {
        "transformers": [PEERS / "models/gemma3-270m/config.json"],
        "vllm": [PEERS / "vllm/bin/python", PEERS / "models/gemma3-270m/config.json"],
        "llama.cpp": [PEERS / "llamacpp/bin/llama-server", PEERS / "models/gemma3-270m-bf16.gguf"],
        "llama.cpp-q4": [PEERS / "llamacpp/bin/llama-server", PEERS / "models/gemma3-270m-q4_k_m.gguf"],
    }
    return not all(path.exists() for path in needed.get(name, []))


@dataclass
class Measured:
    """A row's figures: of every engine, one per round, and the limits of those rounds."""

    row: Row
    values: dict[str, list[float]] = field(default_factory=dict)
    limits: list[float] = field(default_factory=list)

    def figure(self, name: str) -> float | None:
        return median(self.values[name]) if self.values.get(name) else None

    @property
    def ours(self) -> float | None:
        return next((self.figure(name) for name in self.values if name.startswith("cygnet")), None)

    @property
    def best_peer(self) -> tuple[str, float] | None:
        peers = [(name, median(v)) for name, v in self.values.items() if v and not name.startswith("cygnet")]
        if not peers:
            return None
        return (min if self.row.less_is_better else max)(peers, key=lambda peer: peer[1])

    @property
    def ratio(self) -> float | None:
        """Ours to the best peer's."""
        best, ours = self.best_peer, self.ours
        return None if best is None or ours is None else ours / best[1]


def measure(row: Row, workers: Mapping[str, Worker], rounds: int, prompts: Prompts) -> Measured:
    """All engines of a row, in turns."""
    names = [name for name in row.engines if name in workers]
    measured = Measured(row, {name: [] for name in names})
    kept = [prompts.get(f"{row.context}/{index}", row.context) for index in range(row.batch)]
    prefix = prompts.get(f"prefix {row.context}", row.context)
    for name in names:
        if row.op == "decode" and row.context > 1024:
            workers[name].ask("warm", prompts=kept)
        elif row.op == "first_token":
            workers[name].ask("warm", prompts=[prefix])
    work = ModelWork(description(), row.weight_bytes)
    for name in names:
        if row.context <= WARMED:  # what an engine compiles or allocates at first is not what is asked here
            workers[name].ask(row.op, **request(row, rounds, kept, prefix, prompts))
    for turn in range(rounds):
        measured.limits.append(row.limit(Limits.measure(dtype=arithmetic()), work))
        asked = request(row, turn, kept, prefix, prompts)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            answer = workers[name].ask(row.op, **asked)
            if row.op == "held":
                measured.values[name].append(row.batch * answer["bytes"] / (1 << 20))
            else:
                measured.values[name].append(row.value(answer["seconds"]))
    return measured


@cache
def description() -> ModelDescription:
    """Of the model that everyone runs."""
    return describe_model(find_model("gemma3-270m").checkpoint().config)


def request(row: Row, turn: int, kept: list[list[int]], prefix: list[int], prompts: Prompts) -> dict[str, object]:
    """What a worker is asked in a round."""
    if row.op == "prefill":
        return {"prompt": prompts.get(f"{row.name}, round {turn}", row.context)}
    if row.op == "held":  # cached, where the longest prefill was measured before
        return {"prompt": prompts.get("prefill 32K, round 0", row.context)}
    if row.op == "decode":
        return {"prompts": kept, "steps": row.steps}
    tails = [prompts.get(f"{row.name}, round {turn}, user {index}", row.tail) for index in range(row.batch)]
    return {"prompts": [prefix + tail for tail in tails], "steps": row.steps}


def start(names: list[str], threads: int, logs: Path) -> dict[str, Worker]:
    """Start the engines one after the other, and say how long each took."""
    logs.mkdir(parents=True, exist_ok=True)
    started: dict[str, Worker] = {}
    for name in names:
        if missing(name):
            print(f"{name}: not installed (`make peers` does), left out", flush=True)
            continue
        begin = time.perf_counter()
        variables: dict[str, str] = {}
        started[name] = Worker(name, commands(threads)[name], variables, logs / f"{name}.log")
        print(f"{name}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
    return started


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit != "tok/s":
        return f"{value:,.0f} MiB" if unit == "MiB" else f"{value:.2f} s"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def print_header(names: list[str]) -> None:
    print(
        f"\n{'tok/s, or seconds':<34}"
        + "".join(f"{n:>14}" for n in names)
        + f"{'limit':>11}{'to best':>9}{'of limit':>10}"
    )


def print_row(measured: Measured, names: list[str]) -> None:
    row = measured.row
    figures = "".join(f"{shown(measured.figure(name), row.unit):>14}" for name in names)
    limit = median(measured.limits)
    ratio, ours = measured.ratio, measured.ours
    of_limit = None if ours is None else (limit / ours if row.less_is_better else ours / limit)
    print(
        f"{row.name:<34}{figures}{shown(limit, row.unit):>11}"
        + (f"{ratio:>8.2f}x" if ratio is not None else f"{'-':>9}")
        + (f"{of_limit:>9.0%}" if of_limit is not None else ""),
        flush=True,
    )


def check(results: Sequence[Measured], section: str = "engine") -> int:
    """Exit status: whether every target of a section that this run can judge is met; says of each."""
    targets: dict[str, float] = tomllib.loads(TARGETS.read_text())[section]
    missed = 0
    for measured in results:
        target, ratio = targets.get(measured.row.name), measured.ratio
        if target is None or ratio is None:
            print(f"not judged: {measured.row.name} (no {'target' if target is None else 'peer'})")
            continue
        good = ratio <= target if measured.row.less_is_better else ratio >= target
        sign = "<=" if measured.row.less_is_better else ">="
        print(f"{'ok' if good else 'MISSED'}: {measured.row.name}: {ratio:.2f} x the best peer, target {sign} {target}")
        missed += not good
    return 1 if missed else 0


def report(results: Sequence[Measured], facts: dict[str, Any], options: argparse.Namespace) -> dict[str, object]:
    rows = [
        {
            "row": measured.row.name,
            "unit": measured.row.unit,
            "medians": {name: measured.figure(name) for name in measured.values},
            "rounds": measured.values,
            "limit": median(measured.limits),
            "ratio_to_best_peer": measured.ratio,
        }
        for measured in results
    ]
    return {
        "config": {
            "threads": options.threads,
            "quick": options.quick,
            "model": "gemma3-270m",
            "GOMP_SPINCOUNT": SPIN_COUNT,
        },
        "environment": environment(engines=facts),
        "results": rows,
    }


def plot(results: list[Measured], path: Path) -> None:
    """Ours and the peers as a share of the limit, row by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [measured for measured in results if not measured.row.less_is_better]
    names = list(dict.fromkeys(name for measured in rows for name in measured.values))
    colours = {name: f"C{index}" for index, name in enumerate(names)}
    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(rows) + 1.6), layout="constrained")
    for place, measured in enumerate(rows):
        height = 0.8 / len(measured.values)
        for index, name in enumerate(measured.values):
            share = 100 * (measured.figure(name) or 0) / median(measured.limits)
            where = place - 0.4 + (index + 0.5) * height
            bar = axes.barh(where, share, height, color=colours[name], label=name)
            axes.bar_label(bar, [shown(measured.figure(name), "tok/s")], padding=2, fontsize=7)
    axes.set_yticks(range(len(rows)), [m.row.name for m in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of what memory bandwidth and GEMM rate allow (figures at the bars: tokens per second)")
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(reversed(labels), reversed(handles), strict=True))
    figure.legend([first[name] for name in names], names, loc="outside upper center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=130)


def parse() -> argparse.Namespace:
    everyone = list(commands(1))
    parser = argparse.ArgumentParser(description="Cygnet's engine beside others, on CPUs.")
    parser.add_argument("--quick", action="store_true", help="contexts of 512, three rounds, without vLLM: a minute")
    parser.add_argument("--engines", nargs="+", choices=everyone, metavar="NAME", help=f"of {', '.join(everyone)}")
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=0, help="instead of each row's own number")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results here (.png, .svg)")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    return parser.parse_args()


def main() -> int:
    options = parse()
    rows = [row for row in ROWS if row.quick or not options.quick]
    if options.rows:
        rows = [row for row in rows if any(text in row.name for text in options.rows)]
    if not rows:
        raise SystemExit(f"no row matches; there are {', '.join(row.name for row in ROWS)}")
    wanted = options.engines or [name for name in commands(1) if not (options.quick and name == "vllm")]
    names = [name for name in wanted if any(name in row.engines for row in rows)]
    workers = start(names, options.threads, PEERS / "logs")
    if not workers:
        raise SystemExit("no engine is left to measure")
    try:
        print_header(list(workers))
        prompts, results = Prompts(), []
        for row in rows:
            if not any(name in workers for name in row.engines):
                continue
            results.append(measure(row, workers, options.rounds or (3 if options.quick else row.rounds), prompts))
            print_row(results[-1], list(workers))
        facts = {name: worker.ask("facts") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    if options.json:
        options.json.write_text(json.dumps(report(results, facts, options), indent=2) + "\n")
    if options.plot:
        plot(results, options.plot)
    return check(results) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
