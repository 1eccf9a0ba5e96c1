"""From config.json to a description: published configs, the library's spelling, and configs that can't be served."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cygnet.base.errors import ModelLoadError
from cygnet.model.description import MoeSpec, RopeScaling
from cygnet.model.registry import FAMILIES, describe
from model import tiny
from model.tiny import Tiny

GEMMA_270M: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
    "eos_token_id": 1,
}

MIMO_FLASH: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 152_576,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "swa_num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0 if i in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for i in range(48)],
    "moe_layer_freq": [0] + [1] * 47,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5_000_000,
    "swa_rope_theta": 10_000,
    "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_chunk_size": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": None,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}


def test_gemma_without_a_pattern_has_every_sixth_layer_full() -> None:
    model = describe(GEMMA_270M)
    assert [i for i, layer in enumerate(model.layers) if layer.attention.window is None] == [5, 11, 17]
    assert model.window == 511
    assert model.layers[0].attention.rope.theta == 10_000.0
    assert model.layers[5].attention.rope.theta == 1_000_000.0
    assert model.layer_groups[5] == ("full", 0)
    assert model.layer_groups[6] == ("swa", 5)
    assert model.embedding_scale == 640**0.5
    assert model.tied_embeddings
    assert model.eos_token_ids == (1,)
    assert model.num_parameters == 268_098_176


def test_gemma_scaling_concerns_full_layers_only() -> None:
    model = describe({**GEMMA_270M, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert model.layers[5].attention.rope.scaling == RopeScaling("linear", 8.0)
    assert model.layers[0].attention.rope.scaling is None


def test_multimodal_gemma_is_its_text_model() -> None:
    text = {name: value for name, value in GEMMA_270M.items() if name not in ("model_type", "eos_token_id")}
    model = describe({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "vision_config": {}})
    assert model.eos_token_ids == (1, 106)
    assert replace(model, eos_token_ids=(1,)) == describe(GEMMA_270M)


def test_mimo_flash_as_published() -> None:
    """Bytes per token as computed in the model's cache sizing: 9 full layers, 39 SWA layers, bf16."""
    model = describe(MIMO_FLASH)
    geometry = model.kv_geometry(2)
    assert geometry.full.token_bytes == 23_040
    assert geometry.swa.token_bytes == 199_680
    assert geometry.window == 128
    assert geometry.rebuild_tokens == 39 * 128
    swa, full = model.layers[1].attention, model.layers[0].attention
    assert (swa.rope.rotary_dim, swa.rope.theta, full.rope.theta) == (64, 10_000.0, 5_000_000.0)
    assert (swa.sinks, full.sinks, swa.value_scale) == (True, False, 0.707)
    assert model.layers[0].mlp.kind == "dense"
    assert isinstance(model.layers[1].mlp, MoeSpec)
    assert 300e9 < model.num_parameters < 312e9


def test_mimo_window_counts_earlier_keys_in_both_spellings() -> None:
    library = tiny.mimo().config.to_dict()
    assert library["sliding_window"] == 13
    assert describe(library).window == 12
    raw = {name: value for name, value in MIMO_FLASH.items() if name != "sliding_window_size"}
    assert describe(raw).window == 128
    assert describe({**raw, "sliding_window": 129, "sliding_window_size": 128}).window == 128


def test_fused_qkv_can_be_described_but_not_loaded() -> None:
    config = {**MIMO_FLASH, "model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"}
    assert describe(config).window == 128
    with pytest.raises(ModelLoadError, match="fused_qkv"):
        FAMILIES.get("mimo_v2").check_weights(config)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parameters_are_counted_as_transformers_does(tiny_model: Callable[[str], Tiny], family: str) -> None:
    model = tiny_model(family)
    counted = sum(p.numel() for p in model.oracle.parameters())
    counted += sum(b.numel() for name, b in model.oracle.named_buffers() if name.endswith("correction_bias"))
    assert describe(model.checkpoint.config).num_parameters == counted


def test_older_llama_configs() -> None:
    model = describe(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "rope_theta": 500_000,
            "rope_scaling": {"type": "linear", "factor": 2},
        }
    )
    attention = model.layers[0].attention
    assert (attention.num_kv_heads, attention.key_dim) == (4, 16)
    assert attention.rope.theta == 500_000.0
    assert attention.rope.scaling == RopeScaling("linear", 2.0)
    assert not model.kv_geometry(2).has_swa


def test_layers_of_a_group_must_agree() -> None:
    model = describe(GEMMA_270M)
    odd = replace(model.layers[0], attention=replace(model.layers[0].attention, window=100))
    with pytest.raises(ModelLoadError, match=r"swa group .* must agree"):
        replace(model, layers=(odd, *model.layers[1:])).kv_geometry(2)
    only_swa = tuple(layer for layer in model.layers if layer.attention.window is not None)
    with pytest.raises(ModelLoadError, match="at least one full-attention layer"):
        replace(model, layers=only_swa).kv_geometry(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt9"}, "'gpt9' is not supported; supported: gemma3, gemma3_text, gpt_oss, llama, mimo_v2"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_size": None}, "lacks the field 'hidden_size'"),
        ({"num_hidden_layers": "18"}, "num_hidden_layers = '18' should be of type int"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 18 layers"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "lacks the field 'original_max_position_embeddings'"),
        ({"use_bidirectional_attention": True}, "an encoder"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "5 query heads can't share 2 KV heads"),
    ],
)
def test_unusable_configs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        describe({**GEMMA_270M, **change})
