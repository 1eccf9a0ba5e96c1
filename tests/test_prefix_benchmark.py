"""The comparison of prefix caches: what it makes of a trace, how it replays one, and what it asks of the results."""

import sys
import tomllib
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The loader, with the repository's samples."""
    import prefix_traces

    monkeypatch.setattr(prefix_traces, "SHARED", Path("/nowhere"))
    return prefix_traces


@pytest.mark.parametrize(("name", "limit"), [("agentic", 6), ("mooncake", 400)])
def test_equal_numbers_mean_equal_prefixes(traces: ModuleType, name: str, limit: int) -> None:
    requests = traces.load(name, limit)
    before: dict[int, int] = {}
    for request in requests:
        blocks = request.blocks(128)
        assert len(blocks) == request.num_tokens // 128
        for parent, block in zip([-1, *blocks], blocks, strict=False):
            assert before.setdefault(block, parent) == parent
    assert [r.start_s for r in requests] == sorted(r.start_s for r in requests)
    assert all(r.duration_s > 0 and r.message_starts == sorted(set(r.message_starts)) for r in requests)


def test_an_output_is_what_the_next_request_goes_on_with(traces: ModuleType) -> None:
    def request(start_s: float, prompt: int, output: int, blocks: list[int]) -> object:
        return traces.Request(0, start_s, prompt, output, array("q", blocks))

    first, second, other = (
        request(0.0, 1200, 400, [0, 1]),
        request(5.0, 1700, 10, [0, 1, 2]),
        request(9.0, 1300, 300, [0, 1]),
    )
    traces._continue([first, second, other])
    assert first.blocks(512) == [0, 1, 2]
    assert first.blocks(128)[:12] == second.blocks(128)[:12] == list(range(12))
    assert second.message_starts == [1200, 1600]
    assert len(other.blocks(128)) == 12
    assert not set(other.blocks(128)[8:]) & {*first.blocks(128), *second.blocks(128)}, "nobody goes on from the last"
    assert first.duration_s == 5.0, "it must have ended when the next one knew its output"


def test_requests_wait_in_order_and_those_that_never_fit_are_misses(traces: ModuleType) -> None:
    import prefix_replay

    class Room:
        """Room for 100 tokens; everything fits that is not longer."""

        def __init__(self) -> None:
            self.held: dict[int, int] = {}
            self.log: list[tuple[str, int, int]] = []

        def start(self, request: object, now_ns: int) -> object:
            if sum(self.held.values()) + request.prompt_tokens > 100:  # type: ignore[attr-defined]
                return None
            self.held[request.index] = request.prompt_tokens  # type: ignore[attr-defined]
            self.log.append(("start", request.index, now_ns // 10**9))  # type: ignore[attr-defined]
            return prefix_replay.Hit(reused=10, full=30, replayed=5)

        def end(self, request: object, now_ns: int) -> None:
            del self.held[request.index]  # type: ignore[attr-defined]
            self.log.append(("end", request.index, now_ns // 10**9))  # type: ignore[attr-defined]

    sizes = [(0, 60), (1, 60), (2, 20), (3, 500), (4, 10)]
    requests = [
        traces.Request(index, float(start), prompt, 0, array("q"), duration_s=10.0)
        for index, (start, prompt) in enumerate(sizes)
    ]
    cache = Room()
    totals = prefix_replay.replay(requests, cache)
    assert cache.log == [
        *(("start", 0, 0), ("end", 0, 10), ("start", 1, 10), ("start", 2, 10), ("end", 1, 20), ("end", 2, 20)),
        *(("start", 4, 20), ("end", 4, 30)),
    ]
    assert (totals.requests, totals.refused, totals.waited) == (5, 1, 4)
    assert (totals.prompt, totals.reused, totals.lost_windows, totals.replayed) == (650, 40, 80, 20)


def test_with_room_for_all_nearly_everything_is_hit(traces: ModuleType) -> None:
    import prefix_cache
    from prefix_replay import replay
    from prefix_systems import CygnetCache, InfiniteCache

    requests, infinite = traces.load("agentic", 6), InfiniteCache()
    most = replay(requests, infinite)
    hits = {}
    for system in prefix_cache.systems():
        cache = CygnetCache(system, 1 << 41, 65536)
        hits[system.name] = replay(requests, cache).hit_rate / most.hit_rate
        assert cache.manager.audit() == []
    assert all(share <= 1.0 for share in hits.values())
    assert hits["Cygnet"] > 0.995
    assert hits["last window LRU"] < hits["ours: + branch"] < hits["Cygnet"]


def measured(system: str, budget: int, hit_rate: float) -> object:
    import prefix_cache

    return prefix_cache.Measured("agentic", system, budget, {"hit_rate": hit_rate})


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({("vllm", 100): 0.951}, ["at least vllm"]),
        ({("sglang", 90): 0.941}, ["at least sglang"]),
        ({("Cygnet", 100): 0.911, ("Cygnet", 90): 0.90}, ["95% of the", "93% of all"]),
        ({("Cygnet", 90): 0.80, ("vllm", 90): 0.8, ("sglang", 90): 0.8}, ["10% smaller"]),
    ],
)
def test_a_missed_target_is_found(changes: dict[tuple[str, int], float], missed: list[str]) -> None:
    import prefix_cache

    targets = tomllib.loads((BENCHMARKS / "targets.toml").read_text())["prefix_cache"]
    rates = {("Cygnet", 100): 0.95, ("Cygnet", 90): 0.94, ("uniform LRU", 100): 0.57, ("uniform LRU", 90): 0.5}
    rates |= {(name, budget): 0.9 for name in ("vllm", "sglang") for budget in (90, 100)}
    results = [measured("infinite", 1000, 0.96)]
    results += [measured(system, budget, rate) for (system, budget), rate in (rates | changes).items()]
    verdicts = [v for v in prefix_cache.judge("agentic", results, targets) if v.good is False]
    found = [next((text for text in missed if text in v.what), v.what) for v in verdicts]
    assert found == missed
    assert prefix_cache.check(verdicts) == bool(missed)


def test_what_was_not_run_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    import prefix_cache

    targets = tomllib.loads((BENCHMARKS / "targets.toml").read_text())["prefix_cache"]
    verdicts = prefix_cache.judge("agentic", [measured("infinite", 1000, 0.96)], targets)
    assert prefix_cache.check(verdicts) == 0
    assert capsys.readouterr().out.count("not judged") == len(verdicts) == 5


def test_budgets_between_the_largest_and_the_smallest_fall_by_a_tenth() -> None:
    import prefix_cache

    found = prefix_cache.tenths([1000, 500, 250])
    assert found[0] == 1000
    assert all(int(a * 0.9) == b for a, b in pairwise(found))
    assert 250 < found[-1] <= 278
