"""What the router costs: CPU per request, added latency, long bodies; beside no router at all, a relay that passes
bytes on unseen, nginx, and the routers of other projects that `python benchmarks/peers.py routers` has installed; and
how good its index is.

Mock workers, the load and the router are processes of their own on one machine; with two CPUs or more the router has
one to itself. CPU per request is user + system time of the router's processes over the requests served, and the
steadiest column on a shared machine.

    python benchmarks/router.py [--quick] [--json FILE] [--check] [--only NAME ...] [--traces FOLDER]
    python benchmarks/router.py --shapes "4 MB" --json FILE      # a part; FILE keeps the others' figures
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import environment
from router_index import decisions, replay
from router_targets import (
    LOAD_CPU,
    PEER_ROUTERS,
    cpu_seconds,
    free_port,
    peer_binary,
    pinned,
    process,
    target,
    wait_for,
)

HERE = Path(__file__).parent
LOAD = str(HERE / "router_load.py")
DELAY_MS = 50


@dataclass(frozen=True)
class Shape:
    """One kind of load. `mock`: delay in ms and events of the worker's answer."""

    name: str
    callers: int
    body_bytes: int
    mock: str
    seconds: float = 3.0


SHAPES = (
    Shape("plain", 32, 4000, "0 0"),
    Shape("16 events", 32, 4000, "0 16"),
    Shape("100 events", 32, 4000, "0 100"),
    Shape(f"plain, {DELAY_MS} ms worker", 32, 4000, f"{DELAY_MS} 0"),
    Shape(f"16 events, {DELAY_MS} ms worker", 32, 4000, f"{DELAY_MS} 16"),
    Shape("220 KB, 16 events", 20, 220_000, "0 16"),
    Shape("4 MB", 4, 4_000_000, "0 0"),
)


def measure(port: int, pid: int | None, shape: Shape, seconds: float) -> dict[str, float]:
    command = [sys.executable, LOAD, "load", *map(str, (port, shape.callers, seconds, shape.body_bytes)), shape.mock]
    before = cpu_seconds(pid) if pid else 0.0
    done = subprocess.run(command, preexec_fn=pinned(LOAD_CPU), capture_output=True, check=True, timeout=seconds + 60)
    after = cpu_seconds(pid) if pid else 0.0
    out: dict[str, float] = json.loads(done.stdout)
    if out["errors"]:
        raise SystemExit(f"{shape.name}: {out['errors']:.0f} of {out['requests']:.0f} requests failed")
    out["rps"] = out["requests"] / out["seconds"]
    if pid:
        out["cpu_us"] = (after - before) / out["requests"] * 1e6
    return out


def compare(
    quick: bool, only: list[str], shapes: list[Shape], seconds: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by target and shape. Shapes of all targets take turns, so that they meet the same noise."""
    rounds = 1 if quick else 3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [free_port() for _ in range(2)]
        for port in workers:
            stack.enter_context(process([sys.executable, LOAD, "worker", str(port)], LOAD_CPU))
        names = ["direct", "relay", "cygnet rr", "cygnet"]
        redis_port = None
        if shutil.which("redis-server"):
            redis_port = free_port()
            redis = ["redis-server", "--port", str(redis_port), "--save", "", "--dir", str(folder)]
            stack.enter_context(process(redis, LOAD_CPU, stdout=subprocess.DEVNULL))
            names.append("cygnet redis")
        if shutil.which("nginx"):
            names.insert(2, "nginx")
        names += [name for name in PEER_ROUTERS if peer_binary(name).exists()]
        names = [name for name in names if not only or name in only]
        for port in workers:
            wait_for(port)
        targets = {name: stack.enter_context(target(name, workers, redis_port, folder)) for name in names}
        results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
        for port, pid in targets.values():
            measure(port, pid, SHAPES[0], 0.5)  # warm
        for shape in shapes:
            for _ in range(rounds):
                for name, (port, pid) in targets.items():
                    one = measure(port, pid, shape, seconds)
                    best = results[name].get(shape.name)
                    better = {key: min(best[key], one[key]) for key in one if key != "rps"} if best else one
                    better["rps"] = max(best["rps"], one["rps"]) if best else one["rps"]
                    results[name][shape.name] = better
        return results


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for shape in SHAPES:
        if not any(shape.name in by_shape for by_shape in results.values()):
            continue
        lines.append(f"\n{shape.name} ({shape.callers} callers)")
        lines.append(
            f"  {'':14}{'CPU us/req':>11}{'req/s':>9}{'first p50':>11}{'p99':>8}{'total p50':>11}{'p99':>8} ms"
        )
        for name, by_shape in results.items():
            if shape.name not in by_shape:
                continue
            one = by_shape[shape.name]
            cpu = f"{one['cpu_us']:.0f}" if "cpu_us" in one else "-"
            lines.append(
                f"  {name:14}{cpu:>11}{one['rps']:>9.0f}{one['first_p50_ms']:>11.2f}{one['first_p99_ms']:>8.2f}"
                f"{one['total_p50_ms']:>11.2f}{one['total_p99_ms']:>8.2f}"
            )
    return "\n".join(lines)


def long_of_direct(results: dict[str, dict[str, dict[str, float]]], name: str) -> float:
    """Median of the longest bodies, as a multiple of the same without a router."""
    return results[name]["4 MB"]["total_p50_ms"] / results["direct"]["4 MB"]["total_p50_ms"]


def check(report: dict[str, Any]) -> list[str]:
    """What misses `targets.toml`."""
    limits = tomllib.loads((HERE / "targets.toml").read_text())["router"]
    missed = []

    def at_most(name: str, value: float, limit: float) -> None:
        print(f"{'ok  ' if value <= limit else 'MISS'} {name}: {value:.3f}, at most {limit}")
        if value > limit:
            missed.append(name)

    results = report["compare"]
    missing = [shape.name for shape in SHAPES if shape.name not in results.get("direct", {})]
    if missing:
        raise SystemExit(f"nothing to judge: not measured without a router: {', '.join(missing)}")
    for name in ("cygnet", "cygnet redis"):
        if name in results:
            at_most(f"{name}: CPU us per plain request", results[name]["plain"]["cpu_us"], limits["max_plain_cpu_us"])
            at_most(
                f"{name}: added ms p50, plain, {DELAY_MS} ms worker",
                results[name][f"plain, {DELAY_MS} ms worker"]["total_p50_ms"]
                - results["direct"][f"plain, {DELAY_MS} ms worker"]["total_p50_ms"],
                limits["max_added_p50_ms"],
            )
            at_most(f"{name}: 4 MB bodies, of direct", long_of_direct(results, name), limits["max_4mb_of_direct"])
    if "relay" in results:
        print(f"     a relay that looks at nothing: 4 MB bodies, of direct: {long_of_direct(results, 'relay'):.3f}")
    if "redis_route_us" in report["decisions"]:
        at_most("1M-token decision, ms", report["decisions"]["redis_route_us"] / 1000, limits["max_decision_1m_ms"])
    if report["replay"]:
        missing = 1 - report["replay"]["found"] / report["replay"]["held_by_chosen"]
        at_most("agent sessions: hits missed of an infinite index's", missing, limits["max_hits_missed"])
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--check", action="store_true", help="compare with targets.toml; exit 1 on a miss")
    parser.add_argument("--only", nargs="*", default=[], help="of direct, relay, nginx, cygnet, ...")
    parser.add_argument(
        "--shapes", nargs="*", default=[], help='of "plain", "16 events", ..., "4 MB"; with --json FILE'
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--traces", type=Path, help="folder of request traces, for the hit rate of the index")
    args = parser.parse_args()
    unknown = set(args.shapes) - {shape.name for shape in SHAPES}
    if unknown:
        parser.error(f"no such shapes: {', '.join(sorted(unknown))}; there are: {', '.join(s.name for s in SHAPES)}")
    report: dict[str, Any] = {"compare": {}, "replay": {}}
    if args.shapes and args.json and args.json.exists():
        report = json.loads(args.json.read_text())
    report |= {"environment": environment(), "quick": args.quick}
    report["decisions"] = decisions(args.quick)
    if args.traces:
        report["replay"] = replay(args.traces, args.quick)
    shapes = [shape for shape in SHAPES if not args.shapes or shape.name in args.shapes]
    for name, figures in compare(args.quick, args.only, shapes, 0.6 if args.quick else args.seconds).items():
        report["compare"].setdefault(name, {}).update(figures)
    print(table(report["compare"]))
    print("\n1M-token prompt: " + ", ".join(f"{name} {value:.0f}" for name, value in report["decisions"].items()))
    if report["replay"]:
        print("agent sessions: " + ", ".join(f"{name} {value:.5g}" for name, value in report["replay"].items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    if args.check and check(report):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
