"""The built-in models: their facts against published counts, hand-computed KV, and the engine's own reading."""

from dataclasses import replace
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.model.registry import describe
from cygnet.sim.model_config import facts_from_config
from cygnet.sim.model_facts import attended_pairs
from cygnet.sim.model_table import MODELS, model_facts

BY_HAND: dict[str, tuple[int, int, int, int]] = {
    # name: full layers, full bytes per token, SWA bytes per token in the window, window; 16-bit KV
    # layers x KV heads x (K + V) x 2
    "mimo-v2-flash": (9, 9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2, 128),
    "mimo-v2.5": (9, 23_040, 199_680, 128),
    "mimo-v2.5-pro": (10, 51_200, 307_200, 128),
    "gemma-3-270m": (3, 3 * 1 * 512 * 2, 15 * 1 * 512 * 2, 511),
    "gemma-3-1b": (4, 4_096, 22_528, 511),
    "gemma-3-4b": (5, 20_480, 118_784, 1023),
    "gemma-3-12b": (8, 65_536, 327_680, 1023),
    "gemma-3-27b": (10, 81_920, 425_984, 1023),
    "gpt-oss-120b": (18, 36_864, 36_864, 127),
    "gpt-oss-20b": (12, 24_576, 24_576, 127),
    "mistral-7b-v0.3": (32, 131_072, 0, 0),
    "llama-3.1-8b": (32, 131_072, 0, 0),
    "llama-3.1-70b": (80, 327_680, 0, 0),
    "llama-3.1-405b": (126, 516_096, 0, 0),
    "qwen3-8b": (36, 147_456, 0, 0),
    "qwen3-32b": (64, 262_144, 0, 0),
    "qwen3-30b-a3b": (48, 98_304, 0, 0),
    "qwen3-235b-a22b": (94, 192_512, 0, 0),
    "deepseek-v3": (61, 61 * (512 + 64) * 2, 0, 0),  # MLA: one latent and one rotary key
    "deepseek-v3.2": (61, 61 * (512 + 64 + 128) * 2, 0, 0),  # and one index key
    "kimi-k2": (61, 70_272, 0, 0),
    "glm-4.5": (92, 376_832, 0, 0),
    "glm-4.5-air": (46, 188_416, 0, 0),
    "minimax-m2": (62, 253_952, 0, 0),
}


def test_every_model_is_checked() -> None:
    assert set(BY_HAND) == set(MODELS)


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_kv_is_as_computed_by_hand(name: str) -> None:
    layers, full, swa, window = BY_HAND[name]
    geometry = model_facts(name).kv_geometry(2)
    assert geometry.full.num_layers == layers
    assert (geometry.full.token_bytes, geometry.swa.token_bytes, geometry.window) == (full, swa, window)
    assert model_facts(name).kv_geometry(1).full.token_bytes == full // 2


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_the_weights_are_as_many_as_published(name: str) -> None:
    """Published counts round, or count scales and draft layers too: within 1 %. Exact ones are met to 0.01 %."""
    published, counted = MODELS.get(name).published, model_facts(name).num_parameters
    exact = "safetensors: " in MODELS.get(name).source or " parameters" in MODELS.get(name).source
    assert counted == pytest.approx(published, rel=1e-4 if exact else 0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mimo-v2-flash", 15), ("mimo-v2.5-pro", 42), ("gpt-oss-120b", 5.1), ("gpt-oss-20b", 3.6),
        ("qwen3-235b-a22b", 22), ("deepseek-v3", 37), ("kimi-k2", 32), ("glm-4.5", 32), ("minimax-m2", 10),
    ],
)  # fmt: skip
def test_active_weights_are_as_published(name: str, billions: float) -> None:
    assert model_facts(name).num_active_parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_the_checkpoint_weighs_what_its_index_says() -> None:
    """MiMo-V2.5-Pro: 962.40 GiB, of which its three draft layers and the scales are not counted."""
    assert model_facts("mimo-v2.5-pro").resident_bytes(tp=1, ep=1) / 2**30 == pytest.approx(962.4, rel=0.005)


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "vocab_size": 262_144,
        "max_position_embeddings": 32_768,
    },
    "gpt_oss": {
        "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 128, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    },
    "llama": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "mimo_v2_flash": {**MODELS.get("mimo-v2-flash").config, "vocab_size": 512},
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_the_engine_reads_the_same_from_a_config(model_type: str) -> None:
    config = {"model_type": model_type, **CONFIGS[model_type]}
    described = describe({k: v for k, v in config.items() if k != "quantization_config"})
    facts = facts_from_config(config, name="it", source="test")
    assert facts.kv_geometry(2) == described.kv_geometry(2)
    assert facts.max_model_len == described.max_model_len
    assert facts.num_parameters == pytest.approx(described.num_parameters, rel=0.02)


def test_nested_configs_are_read() -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **CONFIGS["gemma3_text"]}}
    facts = facts_from_config(config, name="it", source="test")
    assert replace(facts, name="gemma-3-270m", source=model_facts("gemma-3-270m").source) == model_facts("gemma-3-270m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4]}, "compress their KV"),
        ({"layer_types": ["linear_attention"] * 3}, "layers of type 'linear_attention'"),
        ({"attn_type_list": [1, 0, 1]}, "linear-attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"sliding_window": 64}, "no full-attention layer"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "big"}, "hidden_size = 'big' should be a whole number"),
        ({"quantization_config": {"quant_method": "awq"}}, "--weight-bits"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "llama", **CONFIGS["llama"], **changes}
    with pytest.raises(ConfigError, match="it") as refused:
        facts_from_config(config, name="it", source="test")
    assert message in str(refused.value)


@pytest.mark.parametrize("limit", [None, 1, 5, 129])
def test_pairs_are_those_counted_one_by_one(limit: int | None) -> None:
    for start in (0, 1, 4, 5, 128, 200):
        for count in (1, 2, 7, 150):
            pairs = sum(min(position + 1, limit or position + 1) for position in range(start, start + count))
            assert attended_pairs(start, count, limit) == pairs
