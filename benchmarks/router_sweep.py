"""How much the router's policies gain at which load: the fleet of `router_policies.py` under fewer and more sessions.

Prints, for every seed, cache_aware's hits and input throughput over those of round_robin and least_loaded; and what the
order of the queue does to the P90 of TTFT of prompts of more than 64K tokens against first come, first served, with the
longest wait. A part of the fleet under the same part of the load is quicker to simulate (`--scale 0.25`).

    python benchmarks/router_sweep.py [--quick] [--scale PART] [--seeds N] [--traces FOLDER] [--json FILE] [--plot FILE]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from provenance import environment
from router_policies import SLOW, Case, Simulation, Window, load_sessions, scaled

LOADS = (40, 80, 160, 240, 320)
"""Sessions under way, on 16 workers of 20,000 tokens/s."""
PLACES = tuple(Case(name, name) for name in ("round_robin", "least_loaded", "cache_aware"))
WAIT_LOADS = (200, 240, 280, 320)
"""The same on workers of 8,000 tokens/s, with a budget of 64K."""
ORDERS = (
    replace(SLOW, name="first come", fewest_first=False, late_s=1e9),
    replace(SLOW, name="fewest first"),
    replace(SLOW, name="no budget", budget=0),
)
Runs = dict[str, dict[str, float]]


def run(case: Case, load: int, seed: int, sessions: list[Any], window: Window, scale: float) -> dict[str, float]:
    simulation = Simulation(scaled(replace(case, load=load), scale), list(sessions), seed, window.start_s, window)
    simulation.run()
    return simulation.figures()


def place_line(load: int, seed: int, runs: Runs) -> str:
    ours = runs["cache_aware"]
    line = f"{load:>9}{seed:>5}{ours['hit']:>8.1%}{ours['input_tokens_per_s']:>12,.0f}{ours['busy']:>6.0%}"
    for other in ("round_robin", "least_loaded"):
        one = runs[other]
        more = ours["input_tokens_per_s"] / one["input_tokens_per_s"] - 1
        line += f" |{one['hit']:>8.1%}{one['input_tokens_per_s']:>12,.0f}{one['busy']:>6.0%}{more:>+8.0%}"
    return line


def order_line(load: int, seed: int, runs: Runs) -> str:
    first, fewest, free = runs["first come"], runs["fewest first"], runs["no budget"]
    line = f"{load:>9}{seed:>5}"
    for one in (first, fewest, free):
        line += f" |{one['hit']:>7.1%}{one['input_tokens_per_s']:>11,.0f}{one['long_p90_s']:>8.1f}"
        line += f"{one['short_p90_s']:>8.1f}{one['worst_queued_s']:>8.1f}"
    for name in ("long_p90_s", "short_p90_s"):
        line += f"{fewest[name] / first[name] - 1:>+8.0%}"
    return line


def plot(report: dict[str, Any], path: Path) -> None:
    """Gain against load, one line per seed."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for other, colour in (("round_robin", "tab:blue"), ("least_loaded", "tab:orange")):
        for seed in {entry["seed"] for entry in report["places"]}:
            entries = [entry for entry in report["places"] if entry["seed"] == seed]
            gains = [
                e["runs"]["cache_aware"]["input_tokens_per_s"] / e["runs"][other]["input_tokens_per_s"] * 100 - 100
                for e in entries
            ]
            axes[0].plot([e["load"] for e in entries], gains, "o-", color=colour, label=other if not seed else None)
    axes[0].axhline(30, color="grey", linestyle=":", label="+30 %")
    axes[0].set(xlabel="sessions under way", ylabel="input throughput of cache_aware, % more than")
    for seed in {entry["seed"] for entry in report["orders"]}:
        entries = [entry for entry in report["orders"] if entry["seed"] == seed]
        gains = [
            e["runs"]["fewest first"]["long_p90_s"] / e["runs"]["first come"]["long_p90_s"] * 100 - 100 for e in entries
        ]
        axes[1].plot([e["load"] for e in entries], gains, "o-", color="tab:green", label="seeds" if not seed else None)
    axes[1].axhline(-30, color="grey", linestyle=":", label="-30 %")
    axes[1].set(xlabel="sessions under way", ylabel="P90 TTFT of > 64K, fewest first, % against first come")
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the fleet, one seed, five minutes, two loads"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="part of the fleet and of the load")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--traces", type=Path, help="folder of request traces; else the sample beside this script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, after each line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the gains (SVG); needs matplotlib")
    args = parser.parse_args()
    scale, seeds, window = (0.125, 1, Window(100.0, 300.0, 300.0)) if args.quick else (args.scale, args.seeds, Window())
    sessions = load_sessions(args.traces, 1 << 30)
    report: dict[str, Any] = {"environment": environment(), "scale": scale, "places": [], "orders": []}
    studies = (
        (
            "places",
            PLACES,
            LOADS,
            place_line,
            " sessions seed    hit  input tok/s busy | round_robin, gain | least_loaded",
        ),
        (
            "orders",
            ORDERS,
            WAIT_LOADS,
            order_line,
            " sessions seed | first come: hit, tok/s, >64K p90, rest p90, longest queued"
            " | fewest first | no budget | >64K, rest of fewest first against first come",
        ),
    )
    for key, cases, loads, line, head in studies:
        print(f"\n{head}", flush=True)
        for load in loads[1:4:2] if args.quick else loads:
            for seed in range(seeds):
                runs = {case.name: run(case, load, seed, sessions, window, scale) for case in cases}
                report[key].append({"load": load, "seed": seed, "runs": runs})
                print(line(load, seed, runs), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1))
    if args.plot:
        plot(report, args.plot)


if __name__ == "__main__":
    main()
