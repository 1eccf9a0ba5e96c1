"""Plans against figures computed by hand, and against the article."""

from itertools import pairwise

import pytest

from cygnet.base.errors import ConfigError
from cygnet.kv.sizing import plan_pools
from cygnet.sim.hardware import HARDWARE
from cygnet.sim.model_table import MODELS, model_facts
from cygnet.sim.planner import (
    PlanSettings,
    context_cost,
    context_lengths,
    decode_kv_bytes,
    decode_weight_bytes,
    layouts,
    plan,
)

MILLION = 1 << 20


def test_the_articles_seventh() -> None:
    """§1.1 and §1.2: MiMo-V2.5-Pro's KV and attention are about 1/7 of full attention's, nearly all of the way."""
    facts = model_facts("mimo-v2.5-pro")
    cost = context_cost(facts, MILLION)
    assert cost.kv_bytes == MILLION * 51_200 + 128 * 307_200
    assert cost.uniform_kv_bytes == MILLION * 358_400
    assert cost.kv_ratio == pytest.approx(7.0, rel=0.001)
    assert cost.flops_ratio == pytest.approx(7.0, rel=0.002)
    ratios = [context_cost(facts, n).kv_ratio for n in context_lengths(MILLION)]
    assert all(a < b for a, b in pairwise(ratios))


def test_attention_flops_by_hand() -> None:
    """Two tokens of gpt-oss-20b: three pairs in each of 24 layers, 64 heads, 64 + 64 long, two FLOPs each."""
    assert model_facts("gpt-oss-20b").attention_flops(0, 2) == 24 * 3 * 64 * 128 * 2
    # The second one alone sees two keys.
    assert model_facts("gpt-oss-20b").attention_flops(1, 1) == 24 * 2 * 64 * 128 * 2


def test_a_prefill_in_chunks_costs_the_same() -> None:
    for name in ("mimo-v2.5-pro", "gemma-3-27b", "deepseek-v3.2"):
        facts = model_facts(name)
        chunks = [(0, 1000), (1000, 3000), (4000, 96_000)]
        assert sum(facts.attention_flops(*chunk) for chunk in chunks) == facts.attention_flops(0, 100_000)


def test_mla_decodes_on_the_latent() -> None:
    """DeepSeek-V3 at 1,000 tokens: 61 layers x 128 heads x 1000 keys x (576 + 512) x 2."""
    assert model_facts("deepseek-v3").attention_flops(999, 1) == 61 * 128 * 1000 * (576 + 512) * 2


def test_two_pools_halve_the_articles_expert_parallelism() -> None:
    """§4.1: EP could be halved. MiMo-V2.5-Pro on 96 GB: experts of 69 layers, 384 x 3 x 6144 x 2048 bytes each, leave
    no room for 376 GB / 8 of KV in EP 16."""
    made = plan(model_facts("mimo-v2.5-pro"), HARDWARE.get("H20"), PlanSettings(context=MILLION))
    assert made.dual.layout is not None
    assert made.uniform.layout is not None
    assert (made.dual.layout.tp, made.dual.layout.ep, made.uniform.layout.ep) == (8, 16, 32)
    experts = 69 * 24 * 3 * 6144 * 2048
    assert made.dual.layout.weight_bytes == pytest.approx(experts, rel=0.07)
    assert made.dual.layout.weight_bytes > experts
    assert made.dual.tokens_per_gpu > 2 * made.uniform.tokens_per_gpu


def test_capacity_is_what_the_engines_pools_would_be() -> None:
    facts, settings = model_facts("gemma-3-27b"), PlanSettings(context=131_072)
    made = plan(facts, HARDWARE.get("H200"), settings)
    assert made.dual.layout is not None
    sizes = plan_pools(
        facts.kv_geometry(2),
        block_size=16,
        budget_bytes=int(made.dual.layout.kv_budget),
        chunk=8192,
        model_max_len=131_072,
        session_tokens=131_072,
    )
    assert made.dual.tokens_per_gpu == sizes.full_blocks * 16
    # 141 GB x 0.9 - 4 GB - 54.0 GB of weights = 68.9 GB; a session of 128K is 10.7 + 0.4 GB.
    assert made.dual.layout.kv_budget == pytest.approx(68.9e9, rel=0.001)
    assert made.dual.concurrency == 6


def test_a_dense_model_needs_what_its_weights_need() -> None:
    """141 GB of Llama 70B in 16 bits: not on one H200 beside its KV, but on two."""
    made = plan(model_facts("llama-3.1-70b"), HARDWARE.get("H200"), PlanSettings(context=131_072))
    assert made.dual.layout is not None
    assert (made.dual.layout.gpus, made.dual.layout.tp) == (2, 2)
    assert made.dual == made.uniform or abs(made.dual.tokens_per_gpu - made.uniform.tokens_per_gpu) < 16


def test_what_does_not_fit_says_so() -> None:
    made = plan(model_facts("llama-3.1-405b"), HARDWARE.get("H100"), PlanSettings(context=131_072))
    assert made.dual.layout is None
    assert made.turns == ()


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("gpu", sorted(HARDWARE))
def test_every_plan_is_sound(name: str, gpu: str) -> None:
    facts = model_facts(name)
    settings = PlanSettings(context=min(32_768, facts.max_model_len))
    made = plan(facts, HARDWARE.get(gpu), settings)
    if made.dual.layout is None:
        assert made.uniform.layout is None
        return
    layout = made.dual.layout
    assert made.uniform.layout is None or made.uniform.layout.gpus >= layout.gpus
    assert made.dual.concurrency >= 1
    for turn in made.turns:
        assert turn.batch is not None
        each = decode_kv_bytes(facts, turn.context, kv_bytes=2, tp=layout.tp)
        assert turn.batch * each > decode_weight_bytes(facts, layout, turn.batch)
        assert (turn.batch - 1) * each <= decode_weight_bytes(facts, layout, turn.batch - 1)
    weights = [one.weight_bytes for one in layouts(facts, HARDWARE.get(gpu), settings, tp=layout.tp)]
    assert weights == sorted(weights, reverse=True)


def test_where_decoding_turns_by_hand() -> None:
    """Llama 8B on one H200 at 8K: 16.06 GB of weights less the input embedding's 1.05 GB, against 1.07 GB a request."""
    made = plan(model_facts("llama-3.1-8b"), HARDWARE.get("H200"), PlanSettings(context=8192), tp=1)
    (turn,) = made.turns
    assert turn.batch == int((16.06e9 - 1.05e9) / (8192 * 131_072)) + 1 == 14


def test_an_impossible_wish_is_refused() -> None:
    facts = model_facts("gemma-3-1b")
    with pytest.raises(ConfigError, match="contexts of 1 to 32768 tokens"):
        plan(facts, HARDWARE.get("H100"), PlanSettings(context=32_769))
    with pytest.raises(ConfigError, match="--tp 3 must be a power of two that divides the 4 attention heads"):
        plan(facts, HARDWARE.get("H100"), PlanSettings(context=1024), tp=3)
