"""What the router's policies do for a fleet, in virtual time: hits, input throughput and waits of 16 workers that serve
agent sessions, with the router's own state, policies and queue.

The workers are a simple model: each prefills one request after another at a fixed rate and keeps an LRU cache of
blocks; decoding takes a fixed time per token and disturbs nobody. Sessions are a closed loop: a session's next request
comes after the answer to the one before and the trace's time to think, at most two minutes. A fixed number of them, the
load, is under way at any time: when one ends, another begins. Figures are of what got its first token within a window
after a warm-up.

    python benchmarks/router_policies.py [--quick] [--json FILE] [--traces FOLDER] [--studies NUMBER ...]
"""

import argparse
import asyncio
import gzip
import heapq
import json
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_digest

from cygnet.router.buckets import parse_buckets
from cygnet.router.local_state import LocalState
from cygnet.router.policies import POLICIES, Ask, Weights
from cygnet.router.queue import AdmissionQueue
from cygnet.router.state import Decision, NoRoom, RouteRequest
from cygnet.router.view import Member, WorkerRecord
from provenance import environment

SAMPLE = Path(__file__).parent / "data" / "sessions_512.jsonl.gz"
BLOCK = 512
NS = 1_000_000_000
MAX_THINK_S = 120.0
FAR = 10**18
AGEING = 2000
"""Tokens that a second of waiting makes up for; the router's default."""
PUMPED = 16


@dataclass(frozen=True)
class Case:
    """One fleet to simulate."""

    name: str
    policy: str = "cache_aware"
    told: bool = False
    """Workers tell what they hold (KV events); else the router goes by what it sent them."""
    budget: int = 0
    fewest_first: bool = True
    """Order of the queue: fewest uncached tokens, with ageing; else first come, first served, and nobody overtakes."""
    late_s: float = 1e9
    """Wait after which a request goes first."""
    buckets: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    """Workers per bucket."""
    by_total: bool = False
    waits_for_holder: bool = True
    """A long match is worth waiting for; else whoever has room gets the request."""
    load: int = 320
    """Sessions under way."""
    workers: int = 16
    tokens_per_s: float = 20_000.0
    cache_tokens: int = 4_000_000
    """Per worker."""
    decode_s: float = 0.01


@dataclass
class Turn:
    """One request of a session."""

    tokens: int
    output: int
    think_s: float
    chain: bytes
    keys: list[bytes]


@dataclass
class Worker:
    """Prefills one request at a time, FIFO; an LRU cache of blocks."""

    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    waiting: deque["Request"] = field(default_factory=deque)
    busy: bool = False

    def held(self, keys: list[bytes]) -> int:
        """Leading blocks that are cached."""
        return next((i for i, key in enumerate(keys) if key not in self.cache), len(keys))

    def keep(self, keys: list[bytes], capacity: int) -> None:
        for key in reversed(keys):  # the beginning is used last, and so goes last
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > capacity:
            self.cache.popitem(last=False)


@dataclass
class Request:
    """A turn under way."""

    name: str
    session: int
    turn: Turn
    arrived: float
    slot: int = -1
    hit: int = 0
    sent: float = 0.0
    first_token: float = 0.0


@dataclass(frozen=True)
class Window:
    """When figures are taken."""

    start_s: float = 300.0
    """Sessions begin within that time."""
    warm_s: float = 1200.0
    span_s: float = 1800.0


def load_sessions(traces: Path | None, most: int) -> list[list[Turn]]:
    """Sessions of the agentic trace; keys are scoped by session, as the trace's ids are."""
    path = traces / "agentic" / "sessions_512.jsonl.gz" if traces else SAMPLE
    sessions = []
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if number == most:
                break
            ids: list[int] = []
            turns = []
            for _, tokens, output, _, think_s, _, kept, new in json.loads(line)["requests"]:
                ids = ids[:kept] + new
                keys, key = [], number.to_bytes(8, "little")
                for block in ids:
                    key = xxh3_64_digest(key + int(block).to_bytes(8, "little", signed=True))
                    keys.append(key)
                turns.append(Turn(tokens, output, min(think_s, MAX_THINK_S), b"".join(keys), keys))
            sessions.append(turns)
    return sessions


class Simulation:
    """One run. Time is in seconds; the router's code gets nanoseconds. Without a window every session runs once."""

    def __init__(
        self, case: Case, sessions: list[list[Turn]], seed: int, start_s: float, window: Window | None = None
    ) -> None:
        self.case, self.sessions, self.random, self.window = case, sessions, random.Random(seed), window
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.state = LocalState(lambda: int(self.now * NS), 7200 * NS, FAR, 2_000_000)
        self.workers = [Worker() for _ in range(case.workers)]
        groups = [bucket.partition("=")[0] for bucket in case.buckets]
        of = [group for group, size in zip(groups, case.split, strict=True) for _ in range(size)] or [""] * case.workers
        self.members = [Member(slot, f"http://worker-{slot}:1", group) for slot, group in enumerate(of)]
        for member in self.members:
            asyncio.run(self.state.join(WorkerRecord(url=member.url, group=member.group)))
        self.limits = parse_buckets(case.buckets)
        self.weights = Weights(budget=case.budget, by_total=case.by_total)
        self.policy = POLICIES.get(case.policy)
        self.queue = AdmissionQueue(100_000, FAR, AGEING, 0, int(case.late_s * NS))
        self.queued: dict[str, Request] = {}
        self.placed = 0
        self.done: list[Request] = []
        self.answered: list[Request] = []
        if window is None:
            for number in range(len(sessions)):
                self.at(self.random.uniform(0, start_s), partial(self.arrive, number, 0))
        else:
            self.order = self.random.sample(range(len(sessions)), len(sessions))
            self.begun = 0
            for _ in range(case.load):
                self.at(self.random.uniform(0, start_s), self.begin)

    def at(self, time: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, what))

    def run(self) -> None:
        end = FAR if self.window is None else self.window.warm_s + self.window.span_s
        while self.events and self.events[0][0] <= end:
            self.now, _, what = heapq.heappop(self.events)
            what()
        assert self.state.audit() == []
        if self.window is not None:
            return
        assert not self.queued
        assert asyncio.run(self.state.loads()) == {}

    def begin(self) -> None:
        """The next session of the trace; once it is used up, from its beginning, as sessions of other people."""
        again, place = divmod(self.begun, len(self.order))
        self.begun += 1
        turns = self.sessions[self.order[place]]
        if again:
            tag = again.to_bytes(8, "little")
            named = {key: xxh3_64_digest(key + tag) for turn in turns for key in turn.keys}
            renamed = [[named[key] for key in turn.keys] for turn in turns]
            turns = [replace(t, chain=b"".join(keys), keys=keys) for t, keys in zip(turns, renamed, strict=True)]
        self.sessions.append(turns)
        self.arrive(len(self.sessions) - 1, 0)

    def arrive(self, session: int, place: int) -> None:
        turn = self.sessions[session][place]
        request = Request(f"{session}-{place}", session, turn, self.now)
        behind = bool(self.queued)
        if not self.place(request, look=behind):
            uncached = self.uncached(request) if self.case.fewest_first else 0
            assert self.queue.add(request.name, uncached, int(self.now * NS)) is not None
            self.queued[request.name] = request
            if behind:
                self.pump()

    def uncached(self, request: Request) -> int:
        return max(0, request.turn.tokens - request.hit)

    def place(self, request: Request, *, look: bool = False) -> bool:
        turn, waited_s = request.turn, self.now - request.arrived
        self.placed += 1
        ask = Ask(turn.chain[:8], b"", self.placed, self.random.random())
        plan = self.policy(ask, self.members, self.limits, self.weights)
        known: tuple[int, ...] = ()
        if self.case.told:
            slots = [candidate.slot for candidate in plan.candidates]
            known = tuple(min(turn.tokens, self.workers[slot].held(turn.keys) * BLOCK) for slot in slots)
        told_of = len(turn.keys) if known else 0
        result: list[Decision | NoRoom] = []
        self.state.route(
            RouteRequest(
                request.name,
                turn.chain,
                turn.tokens,
                BLOCK,
                plan,
                self.random.random(),
                known,
                told_of,
                int(waited_s * AGEING) if self.case.waits_for_holder else FAR,
                waited_s >= self.case.late_s,
                look,
            ),
            result.append,
        )
        decision = result[0]
        if isinstance(decision, NoRoom):
            request.hit = decision.matched_tokens
            return False
        request.slot, request.sent = decision.slot, self.now
        worker = self.workers[decision.slot]
        worker.waiting.append(request)
        if not worker.busy:
            self.prefill(worker)
        return True

    def prefill(self, worker: Worker) -> None:
        if not worker.waiting:
            worker.busy = False
            return
        worker.busy = True
        request = worker.waiting.popleft()
        request.hit = min(request.turn.tokens - 1, worker.held(request.turn.keys) * BLOCK)
        seconds = (request.turn.tokens - request.hit) / self.case.tokens_per_s
        self.at(self.now + seconds, lambda: self.prefilled(worker, request))

    def prefilled(self, worker: Worker, request: Request) -> None:
        request.first_token = self.now
        self.answered.append(request)
        worker.keep(request.turn.keys, self.case.cache_tokens // BLOCK)
        self.state.settle(request.name, self.weights.request_tokens)
        self.at(self.now + request.turn.output * self.case.decode_s, lambda: self.finished(request))
        self.prefill(worker)
        self.pump()

    def finished(self, request: Request) -> None:
        self.state.release(request.name)
        self.done.append(request)
        place = int(request.name.partition("-")[2]) + 1
        if place < len(self.sessions[request.session]):
            think_s = self.sessions[request.session][place].think_s
            self.at(self.now + think_s, lambda: self.arrive(request.session, place))
        elif self.window is not None:
            self.at(self.now + self.random.uniform(0, 60.0), self.begin)
        self.pump()

    def pump(self) -> None:
        """As the proxy does: try the next few, until none fits. First come, first served: the first one only."""
        tried = PUMPED if self.case.fewest_first else 1
        moved = True
        while moved and self.queued:
            moved = False
            for waiting in self.queue.next_ones(tried, int(self.now * NS)):
                if self.place(self.queued[waiting.request_id]):
                    self.queue.remove(waiting.request_id)
                    del self.queued[waiting.request_id]
                    moved = True

    def figures(self) -> dict[str, float]:
        begin = self.window.warm_s if self.window is not None else 0.0
        taken = [r for r in self.answered if r.first_token >= begin]
        span_s = self.window.span_s if self.window is not None else max(r.first_token for r in taken)
        waits = [r.first_token - r.arrived for r in taken]
        long = [r.first_token - r.arrived for r in taken if r.turn.tokens > 65536]
        short = [r.first_token - r.arrived for r in taken if r.turn.tokens <= 65536]
        still = [self.now - r.arrived for r in self.queued.values()]
        tokens = sum(r.turn.tokens for r in taken)
        computed = tokens - sum(r.hit for r in taken)
        return {
            "requests": len(taken),
            "hit": 1 - computed / tokens,
            "input_tokens_per_s": tokens / span_s,
            "busy": computed / span_s / self.case.workers / self.case.tokens_per_s,
            "ttft_p50_s": quantile(waits, 0.5),
            "ttft_p90_s": quantile(waits, 0.9),
            "ttft_p99_s": quantile(waits, 0.99),
            "long_p90_s": quantile(long, 0.9),
            "short_p90_s": quantile(short, 0.9),
            "worst_s": max(waits + still),
            "worst_queued_s": max([r.sent - r.arrived for r in taken] + still),
        }


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


SLOW = Case("one pool", budget=65536, load=280, tokens_per_s=8000.0, late_s=60.0)
BUCKETS = ("short=0-64K", "middle=64K-256K", "long=256K-1M")
STUDIES: dict[str, list[Case]] = {
    "Where requests go": [
        Case("round_robin", "round_robin"),
        Case("least_loaded", "least_loaded"),
        Case("cache_aware"),
        Case("cache_aware, told", told=True),
    ],
    "The same, caches a quarter as large": [
        Case("round_robin", "round_robin", cache_tokens=1_000_000),
        Case("least_loaded", "least_loaded", cache_tokens=1_000_000),
        Case("cache_aware", cache_tokens=1_000_000),
        Case("cache_aware, told", told=True, cache_tokens=1_000_000),
    ],
    "Order of those that wait, workers too slow for the load": [
        replace(SLOW, name="first come, any with room", fewest_first=False, waits_for_holder=False, late_s=1e9),
        replace(SLOW, name="first come, first served", fewest_first=False, late_s=1e9),
        replace(SLOW, name="fewest uncached first, ageing", late_s=1e9),
        replace(SLOW, name="the same, late after 60 s"),
        replace(SLOW, name="no budget: workers' own queues", budget=0),
    ],
    "Length buckets": [
        replace(SLOW, workers=8, load=140),
        replace(SLOW, name="by total length", workers=8, load=140, buckets=BUCKETS, split=(2, 5, 1), by_total=True),
        replace(SLOW, name="by uncached length", workers=8, load=140, buckets=BUCKETS, split=(6, 1, 1)),
    ],
}
COLUMNS = {
    "hit": "{:.1%}",
    "input_tokens_per_s": "{:,.0f}",
    "busy": "{:.0%}",
    "ttft_p50_s": "{:.2f}",
    "ttft_p90_s": "{:.2f}",
    "ttft_p99_s": "{:.1f}",
    "long_p90_s": "{:.2f}",
    "short_p90_s": "{:.2f}",
    "worst_s": "{:.1f}",
    "worst_queued_s": "{:.1f}",
}


def scaled(case: Case, scale: float) -> Case:
    """A part of the fleet under the same part of the load."""
    return replace(case, workers=max(1, int(case.workers * scale)), load=max(1, int(case.load * scale)))


def run_study(
    cases: list[Case], sessions: list[list[Turn]], seeds: int, window: Window, scale: float = 1.0
) -> dict[str, dict[str, Any]]:
    """Medians over seeds by case, and each seed's figures. `scale`: a part of the workers and of the load."""
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        runs = []
        for seed in range(seeds):
            simulation = Simulation(scaled(case, scale), list(sessions), seed, window.start_s, window)
            simulation.run()
            runs.append(simulation.figures())
        results[case.name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {"runs": runs}
    return results


def lines(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    names = ("hit", "input tok/s", "busy", "TTFT p50", "p90", "p99", ">64K p90", "<=64K p90", "worst s", "queued s")
    yield f"  {'':32}" + "".join(f"{name:>12}" for name in names)
    for name, figures in results.items():
        yield f"  {name:32}" + "".join(f"{form.format(figures[key]):>12}" for key, form in COLUMNS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sessions on few workers, one seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--traces", type=Path, help="folder of request traces; else the sample beside this script")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--studies", type=int, nargs="+", default=range(1, len(STUDIES) + 1), help="by number, from 1")
    args = parser.parse_args()
    seeds, scale = (1, 0.125) if args.quick else (args.seeds, 1.0)
    window = Window(100.0, 300.0, 300.0) if args.quick else Window()
    sessions = load_sessions(args.traces, 1 << 30)
    report: dict[str, Any] = {"environment": environment(), "sessions": len(sessions), "seeds": seeds, "studies": {}}
    for number, (title, cases) in enumerate(STUDIES.items(), start=1):
        if number not in args.studies:
            continue
        if args.quick:
            cases = [case for case in cases if not case.buckets]
        report["studies"][title] = run_study(cases, sessions, seeds, window, scale)
        print(f"\n{title} (medians of {seeds} seeds)")
        print("\n".join(lines(report["studies"][title])), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
