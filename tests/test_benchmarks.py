"""What the comparison of engines makes of its figures: ratios, targets, and what is asked of every engine alike."""

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
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
