"""A run as one HTML page without links to anything outside: tables, and plots as inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import msgspec

from cygnet.sim.comparison import Estimate, estimates
from cygnet.sim.hardware import Calibration
from cygnet.sim.plots import latencies, over_time
from cygnet.sim.results import Column, Results
from cygnet.sim.scenario import Scenario

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem 1rem .15rem 0; text-align: left; vertical-align: top }
th + th { text-align: right } td:first-child { white-space: nowrap }
td.n { text-align: right; font-variant-numeric: tabular-nums } tr + tr { border-top: 1px solid #eee }
svg { max-width: 100%; height: auto } p.note { color: #666 } pre { background: #f6f6f6; padding: .6rem; overflow: auto }
"""


@dataclass(frozen=True)
class Ran:
    """One scenario that was run, under its name, once per seed."""

    name: str
    scenario: Scenario
    runs: tuple[Results, ...]
    columns: dict[str, Column]
    """Requests of the first seed's run."""
    calibration: Calibration | None = None
    """Of its step times."""


def figure(estimate: Estimate) -> str:
    """The mean for people, and how far it may be off."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"

    text = number(estimate.mean)
    return text if estimate.half_width is None else f"{text} ± {number(estimate.half_width)}"


def html(rans: Sequence[Ran], *, notes: Sequence[str] = ()) -> str:
    """The page. Raises `ConfigError` without matplotlib."""
    title = "Simulation: " + (" against " if len(rans) == 2 else ", ").join(ran.name for ran in rans)
    parts = [f"<h1>{escape(title)}</h1>", *(f'<p class="note">{escape(note)}</p>' for note in notes)]
    parts.append(_table(rans))
    for ran in rans:
        parts.append(f"<h2>{escape(ran.name)}</h2>")
        if len(ran.columns["arrival_ns"]):
            for draw in (over_time, latencies):
                svg = draw(ran.columns, "svg").decode()
                parts.append(svg[svg.index("<svg") :])
        settings = msgspec.json.format(msgspec.json.encode(ran.scenario), indent=2).decode()
        parts.append(f"<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _table(rans: Sequence[Ran]) -> str:
    columns = [estimates(ran.runs) for ran in rans]
    names = [name for name in columns[0] if all(name in column for column in columns)]
    head = "".join(f"<th>{escape(ran.name)}</th>" for ran in rans)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{escape(figure(column[name]))}</td>' for column in columns)
        + "</tr>"
        for name in names
    )
    seeds = len(rans[0].runs)
    note = f'<p class="note">Means over {seeds} seeds, with 95 % confidence intervals.</p>' if seeds > 1 else ""
    return f"<table><tr><th></th>{head}</tr>{rows}</table>{note}"
