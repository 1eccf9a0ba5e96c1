"""Fitting rates to steps whose rates are known."""

from dataclasses import replace
from random import Random

import pytest

from cygnet.base.errors import ConfigError
from cygnet.sim.calibration import LEAST_SAMPLES, Sample, errors, fit
from cygnet.sim.cost import Load, RooflineCost
from cygnet.sim.hardware import HARDWARE, HardwareProfile
from cygnet.sim.model_table import model_facts

FACTS = model_facts("gemma-3-270m")
MACHINE = replace(
    HARDWARE.get("H200"),
    flops_16bit=250e9,
    flops_8bit=250e9,
    memory_bandwidth=30e9,
    flops_efficiency=1.0,
    attention_efficiency=0.3,
    bandwidth_efficiency=1.0,
    kv_efficiency=0.4,
    overlap=0.3,
    step_overhead_ns=2e6,
    request_overhead_ns=3e5,
)
"""As a small CPU may be."""


def loads() -> list[Load]:
    chunks = [Load(count, 1, ((start, count),)) for start in (0, 1024, 4096) for count in (16, 64, 256, 1024)]
    return chunks + [
        Load(batch, batch, ((context, 1),) * batch) for batch in (1, 4, 16) for context in (128, 1024, 4096)
    ]


def samples(machine: HardwareProfile, noise: float) -> list[Sample]:
    cost, rnd = RooflineCost(FACTS, machine, kv_bytes=4), Random(0)
    return [Sample(load, round(cost.load_ns(load) * rnd.gauss(1.0, noise))) for load in loads()]


def test_known_rates_are_found_again() -> None:
    """To a few percent of every step, also of steps that were left out of the fit."""
    given = samples(MACHINE, 0.0)
    found = fit(FACTS, given, name="cpu", machine="test", memory_bytes=1e9, kv_bytes=4)
    assert max(map(abs, errors(FACTS, found, given, 4))) < 0.05
    assert found.calibration is not None
    assert found.calibration.median_error < 0.03
    assert found.flops_16bit == pytest.approx(MACHINE.flops_16bit, rel=0.2)
    assert (found.name, found.calibration.num_samples) == ("cpu", len(given))


def test_noise_shows_in_the_error() -> None:
    found = fit(FACTS, samples(MACHINE, 0.3), name="cpu", machine="test", memory_bytes=1e9, kv_bytes=4)
    assert found.calibration is not None
    assert 0.05 < found.calibration.median_error < 0.6
    assert found.calibration.p90_error > found.calibration.median_error


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="are too few"):
        fit(FACTS, samples(MACHINE, 0.0)[: LEAST_SAMPLES - 1], name="x", machine="x", memory_bytes=1e9, kv_bytes=4)
