"""Seconds until `cygnet serve` is ready: with the weight cache off, at the first start with it, and at later ones.

    python benchmarks/start_time.py [--model NAME] [--rounds N] [--set A.B=C ...] [--json FILE]

Kernels, tokenizers and built-in models are those of your cache, and made there before anything is timed; weights go
into a cache of their own. Files that a start reads are in the page cache, as after any earlier start. The three kinds
take turns, round by round; figures are medians.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from cygnet.cli.child import ChildServer
from cygnet.model.cache_dir import default_cache_dir
from provenance import environment

KINDS = ("off", "first", "later")


def cache_apart(folder: Path) -> Path:
    """Make `folder` the cache of servers to come, sharing what is not weights; where weights go."""
    real = default_cache_dir()
    os.environ["XDG_CACHE_HOME"] = str(folder)
    ours = default_cache_dir()
    ours.mkdir()
    for name in ("kernels", "models", "tokenizers"):
        (real / name).mkdir(parents=True, exist_ok=True)
        (ours / name).symlink_to(real / name)
    return ours / "weights"


def seconds_to_ready(model: str, sets: list[str]) -> float:
    started = perf_counter()
    with ChildServer(model, sets):
        return perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="sets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        weights = cache_apart(Path(name))
        off = [*options.sets, "model.weight_cache=off"]
        seconds_to_ready(options.model, off)
        for _ in range(options.rounds):
            times["off"].append(seconds_to_ready(options.model, off))
            shutil.rmtree(weights, ignore_errors=True)
            for kind in ("first", "later"):
                times[kind].append(seconds_to_ready(options.model, options.sets))
    for kind in KINDS:
        print(f"{kind:6} {statistics.median(times[kind]):6.2f} s   ({', '.join(f'{t:.2f}' for t in times[kind])})")
    if options.json:
        report = {"environment": environment(model=options.model, sets=options.sets), "seconds": times}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
