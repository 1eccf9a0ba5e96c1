"""The fleet in virtual time of `benchmarks/router_policies.py`: its books, and that affinity finds what is there."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def policies() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    import router_policies

    yield router_policies
    sys.path.remove(str(BENCHMARKS))


def test_every_request_ends_and_affinity_finds_what_is_cached(policies: ModuleType) -> None:
    sessions = [turns[:12] for turns in policies.load_sessions(None, 10)]
    figures = {}
    for case in (
        policies.Case("spread", "round_robin"),
        policies.Case("kept", "cache_aware"),
        policies.Case("told", "cache_aware", told=True),
        policies.Case("few", "cache_aware", workers=2, tokens_per_s=500.0, budget=8192),
        replace(policies.STUDIES["Length buckets"][2], tokens_per_s=500.0),
    ):
        simulation = policies.Simulation(case, sessions, 1, 10.0)
        simulation.run()  # which checks the router's books at the end
        figures[case.name] = simulation.figures()
        assert figures[case.name]["requests"] == sum(map(len, sessions))
    assert figures["kept"]["hit"] > 2 * figures["spread"]["hit"]
    assert figures["told"]["hit"] >= figures["kept"]["hit"] - 0.01
    assert figures["few"]["worst_s"] > figures["kept"]["worst_s"]


def test_the_order_of_the_queue_is_what_the_case_says(policies: ModuleType) -> None:
    """Long prompts first in line hold up short ones only where the first to come is the first to be served."""
    turns = [
        [policies.Turn(tokens, 1, 0.0, bytes([n] * 8) * 4, [bytes([n, i]) * 4 for i in range(4)])]
        for n, tokens in enumerate((90_000, 80_000, 70_000, 600, 500), start=1)
    ]
    waits = {}
    for fewest in (True, False):
        case = policies.Case("one", workers=1, budget=1, fewest_first=fewest, tokens_per_s=10_000.0)
        simulation = policies.Simulation(case, turns, 3, 0.5)
        simulation.run()
        waits[fewest] = {request.turn.tokens: request.first_token for request in simulation.done}
    assert waits[True][500] < waits[False][500]
    assert waits[True][500] < min(sorted(waits[True][tokens] for tokens in (90_000, 80_000, 70_000))[1:])


def test_nothing_is_left_of_what_ended(policies: ModuleType) -> None:
    """Two routers, workers that lose their memory, and a look at Redis afterwards (`benchmarks/router_audit.py`)."""
    if not shutil.which("redis-server"):
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    import router_audit

    figures = router_audit.audited(1500)
    assert router_audit.wrong(figures) == []
    assert figures["restarts"] == 6
    assert figures["hit_rate"] > 0.8
