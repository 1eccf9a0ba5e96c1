"""The roofline against figures computed by hand, and against what must hold of any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.ids import RequestId
from cygnet.engine.plan import ScheduledRequest, StepPlan
from cygnet.sim.cost import Load, RooflineCost
from cygnet.sim.expert_load import ExpertBalance, largest_of
from cygnet.sim.hardware import HARDWARE, HardwareProfile
from cygnet.sim.model_facts import MoeFacts
from cygnet.sim.model_table import MODELS, model_facts

IDEAL = HardwareProfile(
    "ideal", "made up: round numbers", 1e12, 100e12, 200e12, 1e12, 100e9, 10e9, flops_efficiency=1.0,
    attention_efficiency=1.0, bandwidth_efficiency=1.0, kv_efficiency=1.0, link_efficiency=1.0,
    collective_ns=0.0, step_overhead_ns=0.0,
)  # fmt: skip


MOE = MoeFacts(num_layers=58, num_experts=256, top_k=8, expert_parameters=1, shared_parameters=0)


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
    near, far = (ExpertBalance().imbalance(MOE, ep, 8000 * ep) for ep in (8, 16))
    assert spread.parts(load)["experts"] == pytest.approx(near * alone.parts(load)["experts"])
    # Bytes there in 8 bits and back in 16, 7/8 of them to others, at 100 GB/s; all wait for who gets most.
    assert spread.parts(load)["collectives"] == pytest.approx(near * 58 * 8000 * 8 * 7168 * 3 * 7 / 8 / 100e9)
    beyond = RooflineCost(facts, IDEAL, ep=16)
    assert beyond.parts(load)["collectives"] == pytest.approx(far * 58 * 8000 * 8 * 7168 * 3 * 15 / 16 / 10e9)


# --- uneven experts


def test_experts_are_as_uneven_as_was_measured() -> None:
    """In steps of many tokens; with few tokens loads differ more, and on one accelerator they can't."""
    assert ExpertBalance(0.85).imbalance(MOE, 16, 1 << 40) == pytest.approx(1 / 0.85, rel=1e-6)
    assert ExpertBalance(0.85).imbalance(MOE, 16, 64) > 1.3
    assert ExpertBalance(0.85).imbalance(MOE, 1, 1000) == 1.0
    assert ExpertBalance(1.0).imbalance(MOE, 16, 1 << 40) == pytest.approx(1.0, abs=1e-4)


def test_fewer_accelerators_even_out_their_experts() -> None:
    """Measured on 32; on 16 each has twice as many experts. By hand: the largest of 32 normal draws is 2.08, of 16
    1.77; so 1 + (1 / 0.85 - 1) x 1.77 / 2.08 x sqrt(15/16 x 16) / sqrt(31/32 x 32) = 1.104."""
    balance = ExpertBalance(0.85, ep=32)
    assert balance.imbalance(MOE, 32, 1 << 40) == pytest.approx(1.1765, abs=1e-3)
    assert balance.imbalance(MOE, 16, 1 << 40) == pytest.approx(1.104, abs=2e-3)


@pytest.mark.parametrize(("ep", "tokens"), [(8, 64), (16, 256), (32, 4096)])
def test_the_largest_load_is_that_of_drawn_experts(ep: int, tokens: int) -> None:
    """256 experts of uneven popularity (log-normal), choices drawn: the formula is within 5 % of what comes out."""
    rng = np.random.default_rng(3)
    largest, spreads = [], []
    for _ in range(300):
        popularity = rng.lognormal(0.0, 0.3, 256)
        popularity /= popularity.sum()
        spreads.append(popularity.std() * 256)
        load = rng.multinomial(tokens * MOE.top_k, popularity).reshape(ep, -1).sum(axis=1)
        largest.append(load.max() / load.mean())
    measured = 1 / (1 + largest_of(ep) * np.mean(spreads) * ((1 - 1 / ep) * ep / 256) ** 0.5)
    assert ExpertBalance(float(measured)).imbalance(MOE, ep, tokens) == pytest.approx(np.mean(largest), rel=0.05)


# --- ranks that wait for one another


def plan_of(*loads: Load) -> list[StepPlan]:
    return [
        StepPlan(
            0,
            (),
            (),
            tuple(ScheduledRequest(RequestId(str(i)), s, n, 0, (), 0, (), True) for i, (s, n) in enumerate(one)),
        )
        for one in (load.requests for load in loads)
    ]


def test_a_step_of_several_ranks_lasts_as_long_as_its_slowest_layers() -> None:
    """MiMo-V2.5-Pro on two ranks of eight. Rank 0 prefills 1,000 tokens after 500,000: its 10 full layers are slow.
    Rank 1 prefills 8,000 from the start: its 60 windowed layers are, with all that goes by tokens. By hand."""
    facts = model_facts("mimo-v2.5-pro")
    cost = RooflineCost(facts, IDEAL, tp=8, ep=16)
    deep, wide = prefill(500_000, 1000), prefill(0, 8000)

    def rest(load: Load) -> float:
        parts = cost.parts(load)
        alone = RooflineCost(facts, IDEAL, tp=8, ep=8).parts(load)["collectives"]  # all-reduces, no way to experts
        return parts["projections and dense MLPs"] + parts["head"] + parts["overhead"] + alone

    flops = 128 / 8 * 2 * (192 + 128)
    full_deep = (1000 * 500_000 + 1000 * 1001 / 2) * flops / 100e12
    full_wide = 8000 * 8001 / 2 * flops / 100e12
    swa_deep = 1000 * 129 * flops / 100e12
    swa_wide = (128 * 129 / 2 + (8000 - 128) * 129) * flops / 100e12
    slow_full = max(full_deep + rest(deep) / 70, full_wide + rest(wide) / 70)
    slow_swa = max(swa_deep + rest(deep) / 70, swa_wide + rest(wide) / 70)
    assert full_deep > full_wide
    assert slow_swa == swa_wide + rest(wide) / 70
    assert facts.moe is not None
    busiest = 9000 / 16 * ExpertBalance().imbalance(facts.moe, 16, 9000)
    experts = facts.moe.num_layers * busiest * 2 * facts.moe.top_k * facts.moe.expert_parameters / 200e12
    way = facts.moe.num_layers * max(1000.0, busiest) * facts.moe.top_k * facts.hidden_size * 3 * 15 / 16 / 10e9
    step = cost.together(plan_of(deep, wide), 2, 0)
    assert step.times_ns[0] == pytest.approx((10 * slow_full + 60 * slow_swa + experts + way) * 1e9, rel=1e-6)
    alone = 10 * (full_deep + full_wide) + 60 * (swa_deep + swa_wide) + rest(deep) + rest(wide)
    assert step.waiting_ns == pytest.approx((2 * (10 * slow_full + 60 * slow_swa) - alone) * 1e9, rel=1e-6)


def test_ranks_with_the_same_to_do_do_not_wait() -> None:
    """And take as long as one of them is taken to take alone. With nothing to do for the other, that one waits."""
    cost = RooflineCost(model_facts("mimo-v2.5"), HARDWARE.get("H20"), tp=4, ep=8)
    for load in (prefill(3000, 4000), decode(30, 7000)):
        both = cost.together(plan_of(load, load), 2, 0)
        assert both.times_ns[0] == pytest.approx(cost.load_ns(load), rel=1e-9)
        assert both.waiting_ns < 10
        alone = cost.together(plan_of(load), 2, 0)
        copying = plan_of(Load(0, 0, ()))
        assert cost.together([*plan_of(load), *copying], 2, 0) == alone
        assert cost.together(copying, 2, 0).times_ns == [cost.step_ns(copying[0])]
        assert 0 < alone.waiting_ns < alone.times_ns[0] < both.times_ns[0]


@settings(deadline=None)
@given(
    ranks=st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=6), min_size=1, max_size=4),
    count=st.integers(1, 30),
    model=st.sampled_from(["mimo-v2.5-pro", "deepseek-v3.2"]),
)
def test_repeated_decodes_of_several_ranks_cost_what_they_cost_one_by_one(
    ranks: list[list[int]], count: int, model: str
) -> None:
    cost = RooflineCost(model_facts(model), HARDWARE.get("H200"), ep=4)

    def plans(further: int) -> list[StepPlan]:
        return plan_of(*(Load(len(rank), len(rank), tuple((s + further, 1) for s in rank)) for rank in ranks))

    one_by_one = [cost.together(plans(further), 4, 0).times_ns[0] for further in range(count + 1)]
    assert cost.together(plans(0), 4, count).times_ns == one_by_one


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
        requests = [
            ScheduledRequest(RequestId(str(i)), s + further, 1, 0, (), 0, (), True) for i, s in enumerate(starts)
        ]
        return StepPlan(0, (), (), tuple(requests))

    cost = RooflineCost(model_facts(model), HARDWARE.get("H200"))
    assert cost.repeats_ns(plan(0), count) == [cost.step_ns(plan(further)) for further in range(1, count + 1)]
