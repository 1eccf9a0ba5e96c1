"""`cygnet cache`: what a running server has cached, on which tier, and how to drop it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from cygnet.cli.options import DEFAULT_URL, ApiKey, ServerUrl

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cygnet.base.cache_report import CacheReport, FlushReport, PoolReport, SequenceReport, WindowReport

cache_app = typer.Typer(help="Look at a server's cache, or empty it.", no_args_is_help=True, rich_markup_mode=None)

MOST_WINDOWS = 6
"""Windows of a sequence that are printed, the last ones."""
LETTERS = {"device": "D", "host": "H", "store": "S"}
LEGEND = "Lengths in tokens. Windows: where they end, and where they are (D device, H host, S store)."


@cache_app.callback()
def cache() -> None:
    """Look at a server's cache, or empty it."""


@cache_app.command()
def inspect(
    url: ServerUrl = DEFAULT_URL,
    limit: Annotated[int, typer.Option(metavar="N", show_default=False, help="sequences to show [20]")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    api_key: ApiKey = "",
) -> None:
    """Print what is cached where: pools, and sequences by their prefix.

    Sequences are named by the beginnings of their keys, which are hashes; never by text.
    """
    from cygnet.cli.cache_client import CacheClient
    from cygnet.cli.console import print_json, stdout

    with CacheClient(url, api_key) as client:
        report = client.inspect(limit)
    if as_json:
        print_json(report)
    else:
        _print_report(stdout(), report)


@cache_app.command()
def flush(
    url: ServerUrl = DEFAULT_URL,
    store: Annotated[bool, typer.Option("--store", help="and all that the store has of the server's model")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    api_key: ApiKey = "",
) -> None:
    """Drop what is cached on the device and in host memory.

    What running requests use stays.
    """
    from cygnet.cli.cache_client import CacheClient
    from cygnet.cli.console import print_json, stdout

    with CacheClient(url, api_key) as client:
        dropped = client.flush(store=store)
    if as_json:
        print_json(dropped)
    else:
        stdout().print("\n".join(dropped_lines(dropped)))


def dropped_lines(dropped: "FlushReport") -> list[str]:
    """What a flush did, in words."""

    def what(blocks: int, windows: int) -> str:
        return f"{_count(blocks, 'block')} and {_count(windows, 'retained window')}"

    lines = [f"dropped on the device: {what(dropped.device_blocks, dropped.device_windows)}"]
    if dropped.host_blocks or dropped.host_windows:
        lines.append(f"dropped in host memory: {what(dropped.host_blocks, dropped.host_windows)}")
    if dropped.kept_blocks:
        lines.append(f"kept, as they are in use: {_count(dropped.kept_blocks, 'block')}")
    if dropped.store:
        lines.append("the store gives up all that it has of this model")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print_report(console: "Console", report: "CacheReport") -> None:
    console.print(_pool_table(report.pools, report.block_size))
    if not report.sequences:
        console.print("\nnothing is cached")
        return
    shown = len(report.sequences)
    rest = f", the {shown:,} used last:" if shown < report.num_sequences else ":"
    console.print(f"\n{_count(report.num_sequences, 'sequence')}{rest}", style="bold")
    console.print(_sequence_table(report.sequences))
    console.print(LEGEND, style="dim")


def _table(*columns: str, left: int) -> "Table":
    """A plain table whose first `left` columns are words and whose other ones numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table


def _pool_table(pools: Iterable["PoolReport"], block_size: int) -> "Table":
    from cygnet.base.units import format_bytes

    table = _table("tier", "group", "", "used", "cached", "free", "capacity", left=3)
    before = ""
    for pool in pools:
        blocks = (pool.used, pool.cached, pool.free, pool.num_blocks)
        tier = "" if pool.tier == before else pool.tier
        table.add_row(tier, pool.group, "blocks", *(f"{count:,}" for count in blocks))
        table.add_row("", "", "tokens", *(f"{count * block_size:,}" for count in blocks))
        table.add_row("", "", "bytes", *(format_bytes(count * pool.block_bytes) for count in blocks))
        before = pool.tier
    return table


def _sequence_table(sequences: Iterable["SequenceReport"]) -> "Table":
    """Sequences that begin alike stand together, below the key of their first block."""
    from rich.text import Text

    columns = ("sequence", "tokens", "device", "host", "store", "shared", "reuses", "running", "age")
    table = _table(*columns, left=1)
    table.padding = (0, 1, 0, 0)
    table.add_column("windows", overflow="fold")
    groups: dict[str, list[SequenceReport]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.prefix, []).append(sequence)
    for prefix, members in groups.items():
        table.add_row(Text(prefix, style="bold"))
        for one in members:
            lengths = (one.num_tokens, one.device_tokens, one.host_tokens, one.store_tokens, one.shared_tokens)
            running = str(one.num_running or "-")
            numbers = (*(f"{length:,}" for length in lengths), f"{one.reuses:,}", running, format_age(one.age_s))
            table.add_row(f" {one.key}", *numbers, format_windows(one.windows))
    return table


def format_windows(windows: "tuple[WindowReport, ...]") -> str:
    """The last windows, such as `512 DH, 1,024 D`."""
    shown = [f"{w.end:,} {''.join(LETTERS.get(tier, '?') for tier in w.tiers)}" for w in windows[-MOST_WINDOWS:]]
    left_out = len(windows) - len(shown)
    return ", ".join([f"{left_out:,} more", *shown] if left_out else shown)


def format_age(seconds: float) -> str:
    """`seconds` in the unit that fits, such as `7s`, `12m`, `3h`, `2d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
