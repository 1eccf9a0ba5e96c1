"""Calls of several ways to move the same bytes, in turns: whatever else the machine does hurts all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

TURN_S = 0.006
"""About what one way's part of a turn takes: long enough that most of its calls find caches as they left them."""
MIN_CALLS, MAX_CALLS = 4, 64

Call = Callable[[int], None]


@dataclass
class Row:
    """One way to move objects of one size. Times in microseconds per call."""

    what: str
    object_bytes: int
    gb_per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float | None
    """Of the client; not known of those that run elsewhere."""
    of_its_bound: float | None


@dataclass
class Way:
    """What is measured, and against which other row."""

    what: str
    call: Call
    bound: str = ""
    num_bytes: int = 0
    """Per call; 0: an object."""
    elsewhere: Callable[[int], list[float]] | None = None
    """Instead of `call`: makes so many calls in another process, and says how long each took."""

    def times(self, first: int, count: int) -> list[float]:
        """Seconds of each of `count` calls."""
        if self.elsewhere is not None:
            return self.elsewhere(count)
        times = []
        for number in range(first, first + count):
            began = perf_counter()
            self.call(number)
            times.append(perf_counter() - began)
        return times


class Turns:
    """Calls of several ways, in turn and in changing order."""

    def __init__(self, size: int, ways: list[Way], calls: int = 0) -> None:
        self.size, self.ways = size, ways
        self.times: dict[str, list[float]] = {way.what: [] for way in ways}
        self.per_turn: dict[str, list[float]] = {way.what: [] for way in ways}
        self.cpu: dict[str, float] = {way.what: 0.0 for way in ways}
        self.turn = 0
        self.calls: dict[str, int] = {}
        for way in ways:  # connections are made, pages touched
            took = min(way.times(0, 3))
            self.calls[way.what] = calls or max(MIN_CALLS, min(MAX_CALLS, int(TURN_S / took)))

    def take(self) -> None:
        """One turn of each way."""
        self.turn += 1
        for at in range(len(self.ways)):
            way = self.ways[(at + self.turn) % len(self.ways)]
            calls = self.calls[way.what]
            cpu = process_time()
            times = way.times(self.turn * calls, calls)
            self.cpu[way.what] += process_time() - cpu
            self.times[way.what] += times
            self.per_turn[way.what].append(median(times))

    def rows(self) -> Iterator[Row]:
        """What was measured, way by way."""
        for way in self.ways:
            times = sorted(self.times[way.what])
            p50 = times[len(times) // 2]
            bounds = self.per_turn.get(way.bound)
            fraction = bounds and median(b / t for b, t in zip(bounds, self.per_turn[way.what], strict=True))
            yield Row(
                way.what,
                self.size,
                (way.num_bytes or self.size) / p50 / 1e9,
                p50 * 1e6,
                times[len(times) * 99 // 100] * 1e6,
                None if way.elsewhere else self.cpu[way.what] / len(times) * 1e6,
                fraction or None,
            )


def show(rows: list[Row]) -> None:
    """Print a table."""
    print(f"{'':36}{'size':>9}{'GB/s':>8}{'p50 us':>9}{'p99 us':>9}{'CPU us':>8}{'of its bound':>14}")
    for row in rows:
        bound = "" if row.of_its_bound is None else f"{row.of_its_bound:.2f}"
        cpu = "" if row.cpu_us is None else f"{row.cpu_us:.0f}"
        size = f"{row.object_bytes >> 10} KiB" if row.object_bytes < 1 << 20 else f"{row.object_bytes >> 20} MiB"
        print(f"{row.what:36}{size:>9}{row.gb_per_s:8.2f}{row.p50_us:9.1f}{row.p99_us:9.0f}{cpu:>8}{bound:>14}")
