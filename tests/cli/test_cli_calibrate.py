"""`cygnet bench calibrate`, with an engine whose steps take what is known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cygnet.cli.bench import calibrate as command
from cygnet.cli.bench.calibrate import POINTS, Document, Measured, Meter, measure, read_profile
from cygnet.engine.core import EngineCore
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.sizing import PoolSizes
from cygnet.sim.cost import RooflineCost
from cygnet.sim.hardware import HARDWARE
from cygnet.sim.model_table import model_facts
from support.paced import Clock, PacedRunner

FACTS = model_facts("gemma-3-270m")
MACHINE = replace(HARDWARE.get("H200"), flops_16bit=4e11, memory_bandwidth=4e10, overlap=0.5, step_overhead_ns=1e6)


def paced(monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """An engine with pools of its own, as a CPU's may be, that measures time by its own clock."""
    core = EngineCore(
        KVManager(FACTS.kv_geometry(4), PoolSizes(16, 4000, 4000, 30_000)),
        SchedulerPolicy(64, 1024),
        fingerprint="paced",
        vocab_size=FACTS.vocab_size,
    )
    clock = Clock()
    monkeypatch.setattr(command, "Meter", lambda engine: Meter(engine, clock_ns=lambda: clock.now_ns))
    cost = RooflineCost(FACTS, MACHINE, kv_bytes=4)
    return LocalEngine(core, PacedRunner(cost, clock), audit="step", clock_ns=lambda: clock.now_ns)


def test_every_kind_of_step_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = measure(paced(monkeypatch), POINTS, 600.0)
    assert {sample.name for sample in samples} == {point.name for point in POINTS}
    cost = RooflineCost(FACTS, MACHINE, kv_bytes=4)
    by_name = {sample.name: sample for sample in samples}
    for point in POINTS:
        load = by_name[point.name].load
        assert load.tokens == point.batch + point.chunk
        if point.chunk and not point.batch:
            ((start, count),) = load.requests
            assert (start, count) == (point.prefix, point.chunk)
        # The median of steps that differ by a few tokens.
        assert by_name[point.name].measured_ns == pytest.approx(cost.load_ns(load), rel=0.01)


def test_a_profile_is_written_in_pieces_and_simulated_with(
    invoke: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_engine", lambda model, sets: paced(monkeypatch))
    file = tmp_path / "cpu.json"
    monkeypatch.setattr(command, "POINTS", POINTS[:3])
    first = invoke("bench", "calibrate", str(file))
    assert first.exit_code == 0
    with pytest.raises(Exception, match="too few measured steps"):
        read_profile(file)
    monkeypatch.setattr(command, "POINTS", POINTS)
    second = invoke("bench", "calibrate", str(file))
    assert second.exit_code == 0
    assert "left out of a fit" in second.stdout
    profile = read_profile(file)
    assert profile.calibration is not None
    assert profile.calibration.num_samples == len(POINTS)
    assert profile.calibration.median_error < 0.05
    scenario = tmp_path / "cpu.toml"
    scenario.write_text(
        "[model]\nname = 'gemma-3-270m'\nkv_bits = 32\n[fleet]\ngpu = 'cpu.json'\n"
        "[kv]\nmemory = '1GiB'\nblock_size = 16\n"
        "[engine]\nmax_num_batched_tokens = 1024\n[workload]\nrate = 1.0\n"
        "[workload.agents]\nsessions = 3\nmax_context = 4000\n"
    )
    made = invoke("simulate", str(scenario))
    assert made.exit_code == 0
    assert f"fitted to {len(POINTS)} kinds of steps of gemma-3-270m" in " ".join(made.stdout.split())


@pytest.mark.parametrize("text", ["{}", "no json", '{"profile": 3}'])
def test_a_file_that_is_no_profile_is_refused(invoke: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    made = invoke("bench", "calibrate", str(file))
    assert made.exit_code == 1
    assert "no profile" in str(made.exception)


def test_another_models_file_is_not_mixed_up(invoke: Any, tmp_path: Path) -> None:
    import msgspec

    file = tmp_path / "x.json"
    file.write_bytes(msgspec.json.encode(Document(None, Measured("other", "m", 2, 1.0, []))))
    made = invoke("bench", "calibrate", str(file))
    assert made.exit_code == 1
    assert "calibration with other" in str(made.exception)
