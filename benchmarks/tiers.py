"""The three tiers: what a prefix costs that is in device memory, in host memory, or on disk; and a real load over them.

    python benchmarks/tiers.py [--quick] [--json FILE] [--plot FILE.png] [--check] [--rounds N] [--prefix N] [--tail N]
                               [--folder DIR] [--threads N]
    python benchmarks/tiers.py --trace [FILE] [--quick] [--json FILE] [--folder DIR]

Without --trace, one engine with the built-in Gemma 3 270M answers prompts of a cached prefix and a new tail, and the
time to the first token is measured with the prefix

    L1              on the device
    L2              in host memory, loaded layer by layer while the layers before compute
    L2, copy first  in host memory, all of it loaded before the first layer computes

at the speed of memory, and again with copies slowed to a link that would need half of the computing time for the
prefix, where copying first must show. (On a CPU both tiers are memory, so unslowed copies are short.) Every engine
state is verified: a prefix that was not found where the row says ends the run. `L3` is the prefix in the store, after
the engine that wrote it has ended and another one was started; it takes turns with plain sequential O_DIRECT reads of
as many bytes from the same disk. All ways take turns within each round, in an order that rotates, with the same prefix
and new tails; figures are medians, and ratios are medians of the rounds' ratios.

With --trace, `cygnet bench serve` replays agents' sessions against `cygnet serve`: see `tier_trace.py`.

--check compares with `[tiers]` in targets.toml.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cygnet.base.threads import usable_cpus
from disk_store import MIB, Plain, memory
from engine import HERE, SPIN_COUNT, TARGETS, Prompts, Worker
from provenance import environment
from tier_trace import DEFAULT_TRACE, run_trace

MODEL_STORE = "4GiB"
HIDDEN = 0.5
"""Share of the computing time that a slowed copy of the whole prefix takes."""


@dataclass(frozen=True)
class Way:
    """Where the prefix is, and how it gets to the device."""

    name: str
    tier: str
    layer_wise: bool = True
    slowed: bool = False


WAYS = (
    Way("L1", "device"),
    Way("L2", "host"),
    Way("L2, copy first", "host", layer_wise=False),
    Way("L1, slow link", "device", slowed=True),
    Way("L2, slow link", "host", slowed=True),
    Way("L2, slow link, copy first", "host", layer_wise=False, slowed=True),
)
RATIOS = {
    "L2 to L1": ("L2", "L1"),
    "L2 to L1, slow link": ("L2, slow link", "L1, slow link"),
    "copy first to L1": ("L2, copy first", "L1"),
    "copy first to L1, slow link": ("L2, slow link, copy first", "L1, slow link"),
    "L3 to L1": ("L3", "L1"),
    "L3 to computing it": ("L3", "cold"),
}
AT_MOST = ("L2 to L1", "L2 to L1, slow link")
AT_LEAST = ("copy first to L1, slow link",)


@dataclass
class StoreReads:
    """What one prompt from the store took: bytes, seconds spent on them, and what plain reads of as many took."""

    num_bytes: int
    fetch_s: float
    plain_s: float

    @property
    def of_plain(self) -> float:
        return self.plain_s / self.fetch_s


class Bench:
    """One engine process after another on one store, and what they were measured at."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._prompts = Prompts()
        self._rounds = options.rounds or (3 if options.quick else 7)
        self._num_prefixes = 1 if options.quick else 3
        self._worker = self._start()
        self.seconds: dict[str, list[float]] = {}
        self.reads: list[StoreReads] = []
        self.bytes_per_s = 0.0
        self.facts: dict[str, Any] = {}

    def _start(self) -> Worker:
        command: list[str | Path] = [sys.executable, HERE / "engine_workers/run_cygnet.py"]
        command += ["--threads", str(self._options.threads)]
        tiers = ["--kv", "1GiB", "--host-cache", "1GiB", "--store", f"{self._folder / 'store'}:{MODEL_STORE}"]
        return Worker("cygnet", [*command, *tiers], {}, self._folder / "cygnet.log")

    def _prefix(self, number: int) -> list[int]:
        return self._prompts.get(f"prefix {number}", self._options.prefix)

    def run(self) -> None:
        """All rounds."""
        for number in range(self._num_prefixes):
            answer = self._worker.ask("first_token", prompts=[self._prefix(number)], steps=1)
            self.seconds.setdefault("cold", []).append(answer["seconds"])
        self._worker.ask("written")
        self.close()
        self._worker = self._start()
        self.facts = self._worker.ask("facts")
        plain = self._plain_file()
        for number in range(self._num_prefixes):  # what is compiled or allocated at first is not what is asked here
            self._from_store(f"warm-up {number}", self._prefix(number), plain, keep=False)
        computing = median(self._measure(WAYS[0], f"warm-up L1 {i}", self._prefix(0)) for i in range(2))
        self.bytes_per_s = self.prefix_bytes() / (HIDDEN * computing)
        for way in WAYS:
            self._measure(way, f"warm-up {way.name}", self._prefix(0))
        for turn in range(self._rounds):
            prefix = self._prefix(turn % self._num_prefixes)
            self._from_store(f"L3, round {turn}", prefix, plain)
            for place in range(len(WAYS)):
                way = WAYS[(place + turn) % len(WAYS)]
                seconds = self._measure(way, f"{way.name}, round {turn}", prefix)
                self.seconds.setdefault(way.name, []).append(seconds)

    def _measure(self, way: Way, name: str, prefix: list[int]) -> float:
        """Seconds to the first token of `prefix` and a new tail."""
        if way.tier != "device":
            self._worker.ask("forget", tier="device")
        else:  # where it was before does not matter, but it must be whole there now
            self._first_token(f"{name}, before", prefix, None)
        speed = self.bytes_per_s if way.slowed else None
        self._worker.ask("imitate", bytes_per_s=speed, layer_wise=way.layer_wise)
        seconds = self._first_token(name, prefix, way.tier)
        self._worker.ask("imitate", bytes_per_s=None, layer_wise=True)
        self._worker.ask("written")  # nothing else is to run beside the next one
        return seconds

    def _first_token(self, name: str, prefix: list[int], tier: str | None) -> float:
        prompt = prefix + self._prompts.get(name, self._options.tail)
        seconds = float(self._worker.ask("first_token", prompts=[prompt], steps=1)["seconds"])
        hit = self._worker.ask("hit")
        if tier is not None and hit[tier] < len(prefix) - self.facts["block_size"]:
            raise RuntimeError(f"{name}: {len(prefix)} tokens were to be found in tier {tier}, and were found as {hit}")
        return seconds

    def _from_store(self, name: str, prefix: list[int], plain: Plain, *, keep: bool = True) -> None:
        self._worker.ask("forget", tier="host")
        self._worker.ask("traffic")
        seconds = self._first_token(name, prefix, "store")
        traffic = self._worker.ask("traffic")
        self._worker.ask("written")
        size = self._plain_bytes()
        started = time.perf_counter()
        plain.read(0, size)
        plain_s = (time.perf_counter() - started) * traffic["bytes_read"] / size
        if keep:
            self.seconds.setdefault("L3", []).append(seconds)
            self.reads.append(StoreReads(traffic["bytes_read"], traffic["fetch_seconds"], plain_s))

    def prefix_bytes(self) -> int:
        """KV that is loaded: full KV of the prefix, and one window."""
        blocks = self._options.prefix // int(self.facts["block_size"])
        return blocks * int(self.facts["full_block_bytes"]) + int(self.facts["window_bytes"])

    def _plain_bytes(self) -> int:
        return -(-self.prefix_bytes() // MIB) * MIB

    def _plain_file(self) -> Plain:
        buffer = memory(self._plain_bytes())
        buffer[:] = os.urandom(len(buffer))
        plain = Plain(self._folder / "plain", buffer, direct=True)
        plain.write(0, len(buffer))
        return plain

    def close(self) -> None:
        """End the engine as a server ends."""
        self._worker.ask("close")
        self._worker.close()


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of every pair of ways that was measured: the median of the rounds' ratios. A way measured in fewer rounds than
    there were (the cold one) counts with its median."""
    found = {}
    for name, (above, below) in RATIOS.items():
        if above in seconds and below in seconds:
            over, under = seconds[above], seconds[below]
            if len(over) != len(under):
                over, under = [median(over)], [median(under)]
            found[name] = median(a / b for a, b in zip(over, under, strict=True))
    return found


def check(found: Mapping[str, float]) -> int:
    """Exit status: whether every target is met; says of each."""
    targets: dict[str, float] = tomllib.loads(TARGETS.read_text())["tiers"]
    missed = 0
    for name in (*AT_MOST, *AT_LEAST):
        good = found[name] <= targets[name] if name in AT_MOST else found[name] >= targets[name]
        sign = "<=" if name in AT_MOST else ">="
        print(f"{'ok' if good else 'MISSED'}: {name}: {found[name]:.2f}, target {sign} {targets[name]}")
        missed += not good
    return 1 if missed else 0


def print_results(bench: Bench, found: Mapping[str, float], options: argparse.Namespace) -> None:
    mib = bench.prefix_bytes() / MIB
    print(f"\nfirst token of {options.prefix} cached + {options.tail} new tokens; {mib:.0f} MiB of KV to load")
    for name, values in bench.seconds.items():
        spread = f"{min(values) * 1e3:,.0f} to {max(values) * 1e3:,.0f}"
        note = " (whole prefix, without the tail)" if name == "cold" else ""
        print(f"  {name:<28}{median(values) * 1e3:>9,.1f} ms   {spread:>18}{note}")
    print(f"slow link: {bench.bytes_per_s / 1e6:,.0f} MB/s, {HIDDEN:.0%} of the computing time for the prefix\n")
    for name, value in found.items():
        print(f"  {name:<28}{value:>9.2f}")
    rate = median(r.num_bytes / r.fetch_s for r in bench.reads)
    plain = median(r.num_bytes / r.plain_s for r in bench.reads)
    share = median(r.of_plain for r in bench.reads)
    print(f"\nstore: read {rate / 1e9:.2f} GB/s, plain O_DIRECT reads {plain / 1e9:.2f} GB/s; {share:.2f} of plain")


def report(bench: Bench, found: Mapping[str, float], options: argparse.Namespace) -> dict[str, object]:
    return {
        "config": {
            "threads": options.threads,
            "quick": options.quick,
            "prefix": options.prefix,
            "tail": options.tail,
            "model": "gemma3-270m",
            "GOMP_SPINCOUNT": SPIN_COUNT,
            "slow_link_bytes_per_s": bench.bytes_per_s,
        },
        "environment": environment(engines={"cygnet": bench.facts}),
        "seconds": bench.seconds,
        "ratios": dict(found),
        "store_reads": [{**vars(read), "of_plain": read.of_plain} for read in bench.reads],
    }


def plot(seconds: Mapping[str, Sequence[float]], path: Path) -> None:
    """Medians and rounds of every way but the cold one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in ("L1", "L2", "L2, copy first", *[w.name for w in WAYS[3:]], "L3") if name in seconds]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1.2), layout="constrained")
    for place, name in enumerate(names):
        bar = axes.barh(place, 1e3 * median(seconds[name]), 0.6, color="C1" if "slow" in name else "C0")
        axes.bar_label(bar, fmt="%.0f", padding=3, fontsize=8)
        axes.plot([1e3 * value for value in seconds[name]], [place] * len(seconds[name]), "k|", markersize=6)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms to the first token")
    figure.savefig(path, dpi=130)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a cached prefix costs, by the tier that it is in.")
    parser.add_argument("--quick", action="store_true", help="one prefix, three rounds: under a minute")
    parser.add_argument("--rounds", type=int, default=0, help="instead of 7 (quick: 3)")
    parser.add_argument("--prefix", type=int, default=8192, help="cached tokens [8192]")
    parser.add_argument("--tail", type=int, default=200, help="new tokens behind them [200]")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results here (.png, .svg)")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    parser.add_argument(
        "--trace", type=Path, nargs="?", const=DEFAULT_TRACE, metavar="FILE", help="replay a trace against servers"
    )
    return parser.parse_args()


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and files are not left behind
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="tiers-"))
    try:
        if options.trace:
            return run_trace(options, folder)
        bench = Bench(options, folder)
        bench.run()
        bench.close()
    finally:
        shutil.rmtree(folder)
    found = ratios(bench.seconds)
    print_results(bench, found, options)
    if options.json:
        options.json.write_text(json.dumps(report(bench, found, options), indent=2) + "\n")
    if options.plot:
        plot(bench.seconds, options.plot)
    return check(found) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
