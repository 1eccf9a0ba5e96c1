"""A run's result for people and for programs."""

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from cygnet.base.errors import ConfigError
from cygnet.cli.bench.client import Result
from cygnet.cli.bench.stats import Spread, Summary
from cygnet.version import __version__

WIDTH = 56
_MEASURES = (
    ("Time to First Token", "TTFT", "ttft_ms"),
    ("Time per Output Token (first one excluded)", "TPOT", "tpot_ms"),
    ("Inter-token Latency", "ITL", "itl_ms"),
    ("End-to-end Latency", "E2EL", "e2el_ms"),
)


def print_report(console: Console, summary: Summary, settings: dict[str, Any], counters: dict[str, float]) -> None:
    """Label and value per line, a section per measure."""
    console.print(f"{' Serving Benchmark Result ':=^{WIDTH}}", style="bold")
    _line(console, "Successful requests", summary.completed)
    _line(console, "Failed requests", summary.failed, style="bold red" if summary.failed else "")
    for kind, count in summary.failures.items():
        console.print(f"  {count} x {kind}: {summary.failure_examples[kind]}"[:300], style="red", markup=False)
    if settings.get("concurrency"):
        _line(console, "Maximum request concurrency", settings["concurrency"])
    if settings.get("rate"):
        _line(console, "Request rate configured (RPS)", float(settings["rate"]))
    _line(console, "Benchmark duration (s)", summary.duration_s)
    _line(console, "Total input tokens", summary.input_tokens)
    _line(console, "Total generated tokens", summary.output_tokens)
    if summary.cached_tokens is not None:
        _line(console, "Cached input tokens", summary.cached_tokens)
        _line(console, "Cached share of input (%)", 100 * (summary.cached_share or 0.0))
    _line(console, "Request throughput (req/s)", summary.request_throughput)
    _line(console, "Output token throughput (tok/s)", summary.output_throughput)
    _line(console, "Total token throughput (tok/s)", summary.total_throughput)
    for title, short, field in _MEASURES:
        spread: Spread | None = getattr(summary, field)
        if spread is not None:
            console.print(f"{title:-^{WIDTH}}", style="bold")
            for label, value in (
                ("Mean", spread.mean),
                ("Median", spread.median),
                ("P90", spread.p90),
                ("P99", spread.p99),
            ):
                _line(console, f"{label} {short} (ms)", value)
    if counters:
        console.print(f"{'Server counters during the run':-^{WIDTH}}", style="bold")
        for name, value in sorted(counters.items()):
            _line(console, name, int(value) if value == int(value) else value)
    console.print("=" * WIDTH, style="bold")


def _line(console: Console, label: str, value: float, style: str = "") -> None:
    shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
    console.print(f"{label + ':':<{WIDTH - 14}}{shown:>14}", style=style or None, markup=False, soft_wrap=True)


def write_json(
    file: Path, summary: Summary, settings: dict[str, Any], counters: dict[str, float], results: list[Result]
) -> None:
    """Everything, with the settings and the client's hardware, so that a run can be repeated and compared.

    Raises `ConfigError` when the file can't be written.
    """
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cygnet": __version__,
        "client": {"machine": platform.machine(), "system": platform.platform(), "python": platform.python_version()},
        "settings": settings,
        "summary": {**msgspec.to_builtins(summary), "cached_share": summary.cached_share},
        "server_counters": counters,
        "requests": [
            {key: value for key, value in msgspec.to_builtins(r).items() if key not in ("text", "token_ids")}
            for r in results
        ],
    }
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from None
