"""The roofline against figures computed by hand, and against what must hold of any."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.engine.plan import ScheduledRequest, StepPlan
from cygnet.sim.cost import Load, RooflineCost
from cygnet.sim.hardware import HARDWARE, HardwareProfile
from cygnet.sim.model_table import MODELS, model_facts

IDEAL = HardwareProfile(
    "ideal", "made up: round numbers", 1e12, 100e12, 200e12, 1e12, 100e9, 10e9, flops_efficiency=1.0,
    attention_efficiency=1.0, bandwidth_efficiency=1.0, kv_efficiency=1.0, link_efficiency=1.0,
    collective_ns=0.0, step_overhead_ns=0.0,
)  # fmt: skip


def decode(batch: int, context: int) -> Load:
    return Load(batch, batch, ((context - 1, 1),) * batch)


def prefill(start: int, count: int) -> Load:
    return Load(count, 1, ((start, count),))


def test_a_decode_of_a_dense_model_reads_weights_and_kv() -> None:
    """Llama 8B at 1 TB/s: 6.98 B weights in layers, 0.53 B in the head, 2 bytes each; 1,000 tokens of 131,072 bytes."""
    parts = RooflineCost(model_facts("llama-3.1-8b"), IDEAL).parts(decode(1, 1000))
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336)
    assert parts["projections and dense MLPs"] == pytest.approx(layers * 2 / 1e12)
    assert parts["head"] == pytest.approx(128_256 * 4096 * 2 / 1e12)
    assert parts["attention"] == pytest.approx(1000 * 131_072 / 1e12)
    assert parts["experts"] == parts["collectives"] == parts["overhead"] == 0.0


def test_a_prefill_of_a_dense_model_is_bound_by_arithmetic() -> None:
    """8,192 tokens of Llama 8B at 100 TFLOPS: two FLOPs a weight and token; 32 heads, 128 + 128 long, per pair."""
    parts = RooflineCost(model_facts("llama-3.1-8b"), IDEAL).parts(prefill(0, 8192))
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336)
    assert parts["projections and dense MLPs"] == pytest.approx(2 * 8192 * layers / 100e12)
    assert parts["attention"] == pytest.approx(32 * 32 * 256 * 2 * (8192 * 8193 // 2) / 100e12)


def test_windowed_layers_do_not_grow_with_the_prefix() -> None:
    """MiMo-V2.5-Pro: attention of 16K tokens after 256K costs 1/6.4 of full attention's."""
    facts = model_facts("mimo-v2.5-pro")
    near, far = (RooflineCost(facts, IDEAL).parts(prefill(n, 16_384))["attention"] for n in (1 << 17, 1 << 18))
    full = 16_384 * (1 << 17) * 10 * 128 * 320 * 2 / 100e12  # what 128K keys more cost the ten full layers
    assert far - near == pytest.approx(full, rel=1e-6)


def test_a_batch_touches_more_experts_and_no_more_than_all() -> None:
    """DeepSeek-V3, one accelerator: 58 layers, 44 M weights an expert in 8 bits."""
    cost = RooflineCost(model_facts("deepseek-v3"), IDEAL)
    expert = 58 * 3 * 7168 * 2048 / 1e12
    assert cost.parts(decode(1, 100))["experts"] == pytest.approx(8 * expert)
    assert cost.parts(decode(2, 100))["experts"] == pytest.approx((16 - 0.25) * expert)
    assert cost.parts(decode(1000, 100))["experts"] == pytest.approx(256 * expert, rel=1e-3)


def test_expert_parallelism_splits_experts_and_pays_for_the_way() -> None:
    """Eight ranks of one accelerator each: what the experts of one have to do is what one rank asks of all."""
    facts = model_facts("deepseek-v3")
    alone, spread = RooflineCost(facts, IDEAL), RooflineCost(facts, IDEAL, ep=8)
    load = prefill(0, 8000)
    assert spread.parts(load)["experts"] == pytest.approx(alone.parts(load)["experts"])
    # Bytes there in 8 bits and back in 16, 7/8 of them to others, at 100 GB/s.
    assert spread.parts(load)["collectives"] == pytest.approx(58 * 8000 * 8 * 7168 * 3 * 7 / 8 / 100e9)
    far = RooflineCost(facts, IDEAL, ep=16)
    assert far.parts(load)["collectives"] == pytest.approx(58 * 8000 * 8 * 7168 * 3 * 15 / 16 / 10e9)


def test_sparse_attention_reads_its_index_and_the_chosen() -> None:
    """DeepSeek-V3.2 at 100,000 tokens: all index keys (128 x 2 bytes), 2,048 latents (576 x 2 bytes), in 61 layers."""
    parts = RooflineCost(model_facts("deepseek-v3.2"), IDEAL).parts(decode(1, 100_000))
    read = 61 * (100_000 * 256 + 2048 * 1152)
    compute = 61 * (2 * 128 * 2048 * (576 + 512) + 2 * 64 * 128 * 100_000) / 100e12
    assert compute < read / 1e12
    assert parts["attention"] == pytest.approx(read / 1e12)


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(deadline=None)
@given(
    tokens=st.integers(2, 20_000),
    start=st.integers(0, 100_000),
    batch=st.integers(1, 300),
    gpu=st.sampled_from(sorted(HARDWARE)),
)
def test_more_work_never_takes_less_time(name: str, tokens: int, start: int, batch: int, gpu: str) -> None:
    cost = RooflineCost(model_facts(name), HARDWARE.get(gpu), tp=1, ep=4)
    assert cost.load_ns(prefill(start, tokens)) <= cost.load_ns(prefill(start, tokens + 1))
    assert cost.load_ns(prefill(start, tokens)) <= cost.load_ns(prefill(start + 100, tokens))
    assert cost.load_ns(decode(batch, start + 1)) <= cost.load_ns(decode(batch + 1, start + 1))


@settings(deadline=None)
@given(
    starts=st.lists(st.integers(0, 40_000), min_size=1, max_size=8),
    count=st.integers(1, 40),
    model=st.sampled_from(["gemma-3-270m", "llama-3.1-8b", "mimo-v2.5-pro", "deepseek-v3.2"]),
)
def test_repeated_decodes_cost_what_they_cost_one_by_one(starts: list[int], count: int, model: str) -> None:
    """To the nanosecond, across the end of windows and of what a sparse model reads."""

    def plan(further: int) -> StepPlan:
        requests = [ScheduledRequest(str(i), s + further, 1, 0, (), 0, (), True) for i, s in enumerate(starts)]
        return StepPlan(0, (), (), tuple(requests))

    cost = RooflineCost(model_facts(model), HARDWARE.get("H200"))
    assert cost.repeats_ns(plan(0), count) == [cost.step_ns(plan(further)) for further in range(1, count + 1)]
