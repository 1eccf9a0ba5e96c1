"""`cygnet gcache top`: what servers are doing now."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cygnet.gcache.rates import Rates
    from cygnet.gcache.runtime.client import GCacheClient

COLUMNS = "gets/s", "hits", "out", "puts/s", "in", "evicted/s", "lost/s", "objects", "memory", "disk", "clients"


def top(client: "GCacheClient", interval_s: float, count: int) -> None:
    """Print a table every `interval_s`, `count` times, 0 for ever; on a terminal each in place of the one before."""
    from cygnet.base.errors import ConfigError
    from cygnet.gcache.rates import rates

    if interval_s <= 0:
        raise ConfigError("--interval must be more than 0 seconds")
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and count != 1 else ""
    before, looked = client.stats(), time.monotonic()
    shown = 0
    while not count or shown < count:
        time.sleep(interval_s)
        now, then, looked = client.stats(), looked, time.monotonic()
        found = {name: rates(before.get(name, {}), stats, looked - then) for name, stats in sorted(now.items())}
        silent = sorted(before.keys() - now.keys())
        print(clear + "\n".join(_table(found, silent)), flush=True)
        before = {**before, **now}
        shown += 1


def _table(found: "dict[str, Rates]", silent: "Iterable[str]") -> list[str]:
    rows = [("server", *COLUMNS), *((name, *_cells(one)) for name, one in found.items())]
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]

    def line(row: tuple[str, ...]) -> str:
        name, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([name.strip().ljust(widths[0]), *cells])

    lines = [line(row) for row in rows]
    return lines + [f"{name}  does not answer" for name in silent]


def _cells(one: "Rates") -> tuple[str, ...]:
    from cygnet.base.units import format_bytes

    return (
        f"{one.gets_per_s:.0f}",
        "-" if one.hits is None else f"{100 * one.hits:.1f}%",
        f"{format_bytes(int(one.bytes_got_per_s))}/s",
        f"{one.puts_per_s:.0f}",
        f"{format_bytes(int(one.bytes_put_per_s))}/s",
        f"{one.evicted_per_s:.0f}",
        f"{one.dropped_per_s:.0f}",
        str(one.objects),
        f"{100 * one.memory_used:.0f}%",
        f"{100 * one.disk_used:.0f}%",
        str(one.connections),
    )


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


Interval = Annotated[float, _option("--interval", "S", "seconds between looks [2]")]
Count = Annotated[int, _option("--count", "N", "tables to print, 0 for ever [0]")]
