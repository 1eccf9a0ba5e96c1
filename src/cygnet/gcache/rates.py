"""What changed at a server between two looks at its statistics, for people. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

Stats = Mapping[str, object]


@dataclass(frozen=True)
class Rates:
    """One server, from one look to the next. Of a server that was started anew in between all counts are new."""

    objects: int
    memory_used: float
    """Part of the arena."""
    disk_used: float
    """Part of the disk tier, 0 without one."""
    gets_per_s: float
    hits: float | None
    """Part of the gets; `None` when there were none."""
    puts_per_s: float
    bytes_got_per_s: float
    bytes_put_per_s: float
    evicted_per_s: float
    dropped_per_s: float
    connections: int


def rates(before: Stats, now: Stats, seconds: float) -> Rates:
    """What happened in the time between. An empty `before` counts from the server's start."""
    if _number(now, "uptime_s") < _number(before, "uptime_s"):
        before = {}
    seconds = seconds if before else max(_number(now, "uptime_s"), 1e-9)

    def grown(name: str) -> float:
        return max(0.0, _number(now, name) - _number(before, name)) / seconds

    gets, puts = _outcomes(before, now, "gets"), _outcomes(before, now, "puts")
    asked = sum(gets.values())
    return Rates(
        objects=int(_number(now, "objects")),
        memory_used=_part(now, "memory_bytes", "memory_capacity_bytes"),
        disk_used=_part(now, "disk_bytes", "disk_capacity_bytes"),
        gets_per_s=asked / seconds,
        hits=gets.get("ok", 0) / asked if asked else None,
        puts_per_s=sum(puts.values()) / seconds,
        bytes_got_per_s=grown("bytes_got"),
        bytes_put_per_s=grown("bytes_put"),
        evicted_per_s=grown("evicted_objects"),
        dropped_per_s=grown("dropped_objects"),
        connections=int(_number(now, "connections")),
    )


def _number(stats: Stats, name: str) -> float:
    value = stats.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _part(stats: Stats, name: str, whole: str) -> float:
    return _number(stats, name) / max(1.0, _number(stats, whole))


def _outcomes(before: Stats, now: Stats, name: str) -> dict[str, float]:
    """New ones by outcome."""
    old, new = before.get(name, {}), now.get(name, {})
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return {}
    return {outcome: max(0, count - old.get(outcome, 0)) for outcome, count in new.items()}
