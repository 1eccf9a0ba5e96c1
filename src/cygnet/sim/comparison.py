"""Several runs side by side: means over seeds, with 95 % confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from cygnet.sim.results import Results, Spread

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom; beyond that 2.2 errs to the wide side."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `half_width` is that of its 95 % confidence interval, `None` with one seed."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        if len(values) < 2:
            return cls(values[0], None)
        degrees = len(values) - 1
        student = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else 2.2
        return cls(fmean(values), student * stdev(values) / sqrt(len(values)))


def measures(results: Results) -> dict[str, float]:
    """What is compared, by label with its unit. What a run did not measure is left out."""
    rows = {
        "requests per second": results.request_rate,
        "input tokens per second": results.input_rate,
        "output tokens per second": results.output_rate,
        "full hit, %": 100 * results.full_hit,
        "window-safe hit, %": 100 * results.window_safe_hit,
        "effective hit, %": 100 * results.effective_hit,
        "of that from host memory, %": 100 * results.host_hit,
        "of that from the store, %": 100 * results.store_hit,
        "rebuilt, %": 100 * results.rebuilt_share,
        "workers busy, %": 100 * results.busy_share,
        "of their steps waiting for slower ranks, %": 100 * results.waiting_share,
        "prompt tokens per second of a rank's steps": results.step_input_rate,
        "preemptions": results.preemptions,
        "refused": sum(results.refused.values()),
    }
    if results.decode_busy_share is not None and results.decoding is not None:
        rows["decode workers busy, %"] = 100 * results.decode_busy_share
        rows["requests decoding at once, per decode worker"] = results.decoding
    if results.goodput is not None:
        rows["good requests per second"] = results.goodput
    for name, spread in (
        ("TTFT", results.ttft_ms),
        ("TPOT", results.tpot_ms),
        ("E2E", results.e2el_ms),
        ("hand-over", results.handover_ms),
    ):
        if spread is not None:
            rows |= {f"{name} {label}, ms": value for label, value in _points(spread).items()}
    return rows


def _points(spread: Spread) -> dict[str, float]:
    return {"mean": spread.mean, "P50": spread.p50, "P90": spread.p90, "P99": spread.p99}


def estimates(runs: Sequence[Results]) -> dict[str, Estimate]:
    """Every measure that all runs have, over the runs (one per seed)."""
    rows = [measures(run) for run in runs]
    return {name: Estimate.of([row[name] for row in rows]) for name in rows[0] if all(name in row for row in rows)}
