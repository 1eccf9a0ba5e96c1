"""What benchmarks make of their figures: ratios, targets, and what is asked of every engine alike."""

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def engine() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("engine_benchmark", BENCHMARKS / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


def test_every_target_is_a_row_and_every_row_has_one(engine: ModuleType) -> None:
    targets = tomllib.loads((BENCHMARKS / "targets.toml").read_text())["engine"]
    assert set(targets) == {row.name for row in engine.ROWS}


@pytest.mark.parametrize(
    ("name", "ours", "peers", "status"),
    [
        ("decode b8 @512", [150.0, 160.0, 400.0], {"vllm": [100.0], "llama.cpp": [50.0]}, 0),
        ("decode b8 @512", [149.0], {"vllm": [100.0], "llama.cpp": [50.0]}, 1),
        ("8K cached + 200: first token", [0.59], {"vllm": [1.0], "llama.cpp": [2.0]}, 0),
        ("8K cached + 200: first token", [0.61], {"vllm": [1.0], "llama.cpp": [2.0]}, 1),
        ("KV of 16 sessions of 32K", [100.0], {"vllm": [500.0]}, 0),
        ("KV of 16 sessions of 32K", [200.0], {"vllm": [500.0]}, 1),
    ],
)
def test_a_missed_target_is_found(
    engine: ModuleType,
    capsys: pytest.CaptureFixture[str],
    name: str,
    ours: list[float],
    peers: dict[str, list[float]],
    status: int,
) -> None:
    """Medians count, and the peer that is best in the row's own sense."""
    row = next(row for row in engine.ROWS if row.name == name)
    measured = engine.Measured(row, {"cygnet": ours, **peers}, [1.0])
    assert measured.best_peer[0] == "vllm"
    assert engine.check([measured]) == status
    assert ("MISSED: " + name in capsys.readouterr().out) == bool(status)


def test_a_row_without_peers_is_not_judged(engine: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    measured = engine.Measured(engine.ROWS[0], {"cygnet": [1.0]}, [1.0])
    assert engine.check([measured]) == 0
    assert "not judged" in capsys.readouterr().out


def test_what_may_not_be_cached_is_new_in_each_round(engine: ModuleType) -> None:
    prompts = engine.Prompts()
    for row in engine.ROWS:
        asked = [engine.request(row, turn, [[1], [2]], [3] * row.context, prompts) for turn in range(3)]
        if row.op == "prefill":
            starts = [tuple(one["prompt"][:8]) for one in asked]
            assert len(set(starts)) == 3
        if row.op == "first_token":
            tails = {tuple(prompt[row.context :]) for one in asked for prompt in one["prompts"]}
            assert len(tails) == 3 * row.batch
            assert all(prompt[: row.context] == [3] * row.context for one in asked for prompt in one["prompts"])


@pytest.fixture(scope="module")
def tiers() -> Iterator[ModuleType]:
    yield from loaded("tiers")


@pytest.fixture(scope="module")
def branches() -> Iterator[ModuleType]:
    yield from loaded("branches")


def loaded(name: str) -> Iterator[ModuleType]:
    """A script of the folder with the others that it imports; none of them stays loaded."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for other in set(sys.modules) - before:
            if (getattr(sys.modules[other], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[other]


def test_ratios_are_taken_round_by_round(tiers: ModuleType) -> None:
    """A machine that is slow for one round is slow for all ways of it; the cold prefix has rounds of its own."""
    seconds = {
        "cold": [10.0],
        "L3": [1.5, 9.0, 1.6],
        "L1": [1.0, 8.0, 1.0],
        "L2": [1.05, 8.4, 1.06],
        "L1, slow link": [1.0, 1.0, 1.0],
        "L2, slow link": [1.0, 1.1, 1.2],
        "L2, slow link, copy first": [1.4, 1.6, 1.5],
    }
    found = tiers.ratios(seconds)
    assert found == pytest.approx(
        {
            "L2 to L1": 1.05,
            "L2 to L1, slow link": 1.1,
            "copy first to L1, slow link": 1.5,
            "L3 to L1": 1.5,
            "L3 to computing it": 0.16,
        }
    )
    assert tiers.check(found) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("L2 to L1", 1.11), ("L2 to L1, slow link", 1.11), ("copy first to L1, slow link", 1.05)],
)
def test_a_missed_target_of_the_tiers_is_found(
    tiers: ModuleType, capsys: pytest.CaptureFixture[str], name: str, value: float
) -> None:
    good = {"L2 to L1": 1.0, "L2 to L1, slow link": 1.0, "copy first to L1, slow link": 1.5}
    assert tiers.check({**good, name: value}) == 1
    assert f"MISSED: {name}" in capsys.readouterr().out


def test_every_target_of_the_tiers_is_a_ratio(tiers: ModuleType) -> None:
    targets = tomllib.loads((BENCHMARKS / "targets.toml").read_text())["tiers"]
    assert set(targets) == {*tiers.AT_MOST, *tiers.AT_LEAST} <= set(tiers.RATIOS)
    names = {way.name for way in tiers.WAYS} | {"L3", "cold"}
    assert {name for pair in tiers.RATIOS.values() for name in pair} <= names


def test_the_device_pool_of_a_replay_is_a_tenth_if_that_serves_the_longest_prompt(tiers: ModuleType) -> None:
    trace = sys.modules["tier_trace"]
    geometry = trace.description().kv_geometry(2)
    shared = list(range(64))
    whole = trace.working_set([[shared, shared + [1] * 40], [shared + [2] * 16]])
    assert (whole.num_requests, whole.num_tokens, whole.longest, whole.num_sessions) == (3, 64 + 104 + 80, 104, 2)
    assert whole.distinct_tokens == 64 + 32 + 16, "whole blocks, each once"
    window = geometry.window_blocks(trace.BLOCK) * geometry.swa.block_bytes(trace.BLOCK)
    assert whole.num_bytes(geometry) == 7 * geometry.full.block_bytes(trace.BLOCK) + 2 * window
    assert trace.device_bytes(whole, geometry) > whole.num_bytes(geometry) // 10
    large = trace.WorkingSet(100, 10**7, 10**6, 4000, 20)
    assert trace.device_bytes(large, geometry) == large.num_bytes(geometry) // 10


def test_servers_of_a_replay_differ_in_one_tier_at_a_time(tiers: ModuleType) -> None:
    servers = sys.modules["tier_trace"].servers(10**9, 10**8, Path("/s"), quick=False)
    assert list(servers) == ["all in L1", "L1", "L1 + L2", "L1 + L2 + L3", "restarted"]
    assert servers["restarted"] == servers["L1 + L2 + L3"] == {**servers["L1 + L2"], "kv.store": "/s:4000000000"}
    assert servers["L1 + L2"] == {**servers["L1"], "kv.host_cache": 2 * 10**9}


def test_branches_share_what_their_row_says_and_no_more(branches: ModuleType) -> None:
    prompts = branches.Prompts()
    seen: set[tuple[int, ...]] = set()
    for row in branches.ROWS:
        for turn in range(2):
            requests, branched = branches.conversation(row, turn, prompts)
            assert tuple(map(len, requests)) == row.turns
            assert all(later[: len(one)] == one for one, later in pairwise(requests))
            assert branched[: row.context] == requests[-1][: row.context]
            assert branched[row.context] != requests[-1][row.context]
            assert len(branched) == row.context + row.tail
            seen.add(tuple(branched[:16]))
    assert len(seen) == 2 * len(branches.ROWS), "conversations are new in every round"


def test_every_target_of_a_branch_is_a_row(branches: ModuleType) -> None:
    targets = tomllib.loads((BENCHMARKS / "targets.toml").read_text())["branches"]
    assert set(targets) < {row.name for row in branches.ROWS}


def test_what_retention_rules_keep(branches: ModuleType) -> None:
    """Of a conversation in turns, windows at their ends serve every branch there; of one request, only its own end."""
    geometry = branches.description().kv_geometry(2)
    turns = range(1024, 4097, 1024)
    nothing = branches.retained(geometry, (), turns)
    ends = branches.retained(geometry, ("prompt_end", "response_end"), turns)
    denser = branches.retained(geometry, ("prompt_end", "response_end", "geometric"), turns)
    assert (nothing.windows, nothing.swa_bytes) == (0, 0)
    assert nothing.at_turns == 2560, "without a window all is computed again"
    assert (ends.windows, ends.at_turns) == (8, 0)
    assert nothing.anywhere > ends.anywhere > denser.anywhere
    assert denser.swa_bytes > ends.swa_bytes
