"""The cost model fitted to measured steps of one machine.

Where there was a data sheet's peak, and an assumption of how much of it is reached, there is a measured rate then: of
products, of the LM head beside them, attention, reading weights, reading KV; and how far computing and reading overlap,
and what a step and a request cost besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from cygnet.base.errors import ConfigError
from cygnet.sim.cost import Load, RooflineCost
from cygnet.sim.hardware import Calibration, HardwareProfile
from cygnet.sim.model_facts import ModelFacts

LEAST_SAMPLES = 12
"""Fewer than this do not tell eight rates apart."""
_FIRST_STEP, _LAST_STEP = 1.0, 0.003
"""Of the search, in the logarithm of a rate."""
FOLDS = 3
USUAL_ERROR = 0.15
"""Of a step. What is off by far more was disturbed as it was measured, and counts little more for being off by more."""
RIDGE = 2e-3
"""Keeps rates that no step tells of near where the search began: per sample and square of the logarithm."""


@dataclass(frozen=True)
class Sample:
    """A step that was measured."""

    load: Load
    measured_ns: int
    name: str = ""


@dataclass(frozen=True)
class _Rates:
    """What is fitted, in logarithms but for `overlap`, whose odds are."""

    flops: float = log(1e11)
    attention: float = log(2e10)
    weights: float = log(1e10)
    kv: float = log(5e9)
    head: float = 0.0
    odds: float = 0.0
    step_ns: float = log(1e6)
    request_ns: float = log(1e5)

    def profile(self, name: str, memory_bytes: float) -> HardwareProfile:
        """The same as a cost model takes it."""
        flops, bandwidth = exp(self.flops), exp(self.weights)
        return HardwareProfile(
            name=name,
            source="cygnet bench calibrate",
            memory_bytes=memory_bytes,
            flops_16bit=flops,
            flops_8bit=flops,
            memory_bandwidth=bandwidth,
            link_bandwidth=bandwidth,
            network_bandwidth=bandwidth,
            host_bandwidth=bandwidth,
            per_node=1,
            host_memory_bytes=memory_bytes,
            flops_efficiency=1.0,
            attention_efficiency=exp(self.attention) / flops,
            bandwidth_efficiency=1.0,
            kv_efficiency=exp(self.kv) / bandwidth,
            head_speed=exp(self.head),
            overlap=1.0 / (1.0 + exp(-self.odds)),
            link_efficiency=1.0,
            host_efficiency=1.0,
            collective_ns=0.0,
            step_overhead_ns=exp(self.step_ns),
            request_overhead_ns=exp(self.request_ns),
        )


def errors(facts: ModelFacts, profile: HardwareProfile, samples: Sequence[Sample], kv_bytes: int) -> list[float]:
    """Predicted over measured time, less 1, of each sample."""
    cost = RooflineCost(facts, profile, kv_bytes=kv_bytes)
    return [cost.load_ns(sample.load) / sample.measured_ns - 1.0 for sample in samples]


def fit(
    facts: ModelFacts, samples: Sequence[Sample], *, name: str, machine: str, memory_bytes: float, kv_bytes: int
) -> HardwareProfile:
    """The profile that is off least, in the logarithm of the times. Deterministic.

    Its `calibration` has the errors of samples that a third profile was not fitted to: each sample is left out once.
    Raises `ConfigError` for too few samples.
    """
    if len(samples) < LEAST_SAMPLES:
        raise ConfigError(f"{len(samples)} measured steps are too few to fit to; {LEAST_SAMPLES} are needed: more time")

    def fitted(chosen: Sequence[Sample]) -> HardwareProfile:
        return _search(facts, chosen, kv_bytes).profile(name, memory_bytes)

    held_out: list[float] = []
    for fold in range(FOLDS):
        rest = [sample for index, sample in enumerate(samples) if index % FOLDS != fold]
        held_out += errors(facts, fitted(rest), samples[fold::FOLDS], kv_bytes)
    off = np.abs(held_out)
    found = Calibration(facts.name, machine, len(samples), float(np.median(off)), float(np.quantile(off, 0.9)))
    return replace(fitted(samples), calibration=found)


def _search(facts: ModelFacts, samples: Sequence[Sample], kv_bytes: int) -> _Rates:
    """Pattern search: each rate up or down by a step, then along what helped; smaller steps where nothing does."""
    names = list(_Rates.__dataclass_fields__)

    def loss(rates: _Rates) -> float:
        cost = RooflineCost(facts, rates.profile("", 1.0), kv_bytes=kv_bytes)
        off = sum(
            log(1.0 + (log(cost.load_ns(sample.load) / sample.measured_ns) / USUAL_ERROR) ** 2) for sample in samples
        )
        return off + RIDGE * len(samples) * sum((getattr(rates, name) - getattr(start, name)) ** 2 for name in names)

    start = _Rates()
    best, step = start, _FIRST_STEP
    least = loss(best)
    while step > _LAST_STEP:
        before = best
        for name in names:
            for change in (step, -step):
                tried = replace(best, **{name: getattr(best, name) + change})
                if (value := loss(tried)) < least:
                    best, least = tried, value
                    break
        moved = {name: 2 * getattr(best, name) - getattr(before, name) for name in names}
        tried = replace(best, **moved)
        if best == before:
            step /= 2
        elif (value := loss(tried)) < least:
            best, least = tried, value
    return best
