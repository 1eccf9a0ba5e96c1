"""Replays a trace over a prefix cache in virtual time, and counts. Standard library only: peers' workers run it too."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from typing import Protocol

from prefix_traces import Request


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request found, in tokens of its prompt."""

    reused: int
    """Not computed again."""
    full: int
    """Whose full-attention KV was there, whatever became of the windows."""
    replayed: int = 0
    """Computed only to get a window back, though their full KV was there."""


class Cache(Protocol):
    """A prefix cache under test. All tokens of a request are computed at its start; its KV is held until its end."""

    def start(self, request: Request, now_ns: int) -> Hit | None:
        """Begin the request, or change nothing and return `None` where it finds no room beside those that run."""

    def end(self, request: Request, now_ns: int) -> None:
        """The request is done; what it computed may stay cached."""


@dataclass
class Totals:
    """Sums over a replay, in tokens unless said otherwise."""

    requests: int = 0
    prompt: int = 0
    reused: int = 0
    lost_windows: int = 0
    """Full KV was there, but computed again for lack of a window; those replayed included."""
    replayed: int = 0
    waited: int = 0
    """Requests that found no room at first."""
    refused: int = 0
    """Requests too long for the cache on its own: they count as missed."""

    @property
    def hit_rate(self) -> float:
        return self.reused / self.prompt if self.prompt else 0.0

    def add(self, request: Request, hit: Hit | None) -> None:
        self.requests += 1
        self.prompt += request.prompt_tokens
        if hit is None:
            self.refused += 1
            return
        self.reused += hit.reused
        self.lost_windows += hit.full - hit.reused
        self.replayed += hit.replayed

    def facts(self) -> dict[str, float]:
        return {**asdict(self), "hit_rate": self.hit_rate}


def replay(requests: Sequence[Request], cache: Cache) -> Totals:
    """Start every request when the trace says so or, in the order of arrival, when there is room."""
    totals, waiting = Totals(), deque[Request]()
    running: list[tuple[int, int, Request]] = []

    def admit(now_ns: int) -> None:
        while waiting:
            request = waiting[0]
            hit = cache.start(request, now_ns)
            if hit is None and running:
                return
            totals.add(request, hit)
            waiting.popleft()
            if hit is not None:
                heappush(running, (now_ns + round(request.duration_s * 1e9), request.index, request))

    def finish(upto_ns: int | None) -> None:
        while running and (upto_ns is None or running[0][0] <= upto_ns):
            now_ns, _, request = heappop(running)
            cache.end(request, now_ns)
            admit(now_ns)

    for request in requests:
        now_ns = round(request.start_s * 1e9)
        finish(now_ns)
        totals.waited += bool(waiting)
        waiting.append(request)
        if len(waiting) == 1:
            admit(now_ns)
            totals.waited += bool(waiting)
    finish(None)
    return totals
