"""Llama and models of its layout: full attention in every layer."""

from collections.abc import Mapping
from typing import Any

from cygnet.model.config_json import ConfigFields, eos_token_ids, rope_spec
from cygnet.model.description import AttentionSpec, DenseMlp, LayerSpec, ModelDescription
from cygnet.model.registry import DECODER_COMPONENTS, FAMILIES, Family


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Read a `llama` config.json."""
    fields = ConfigFields(config)
    hidden_size, num_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    head_dim = fields.get("head_dim", int, hidden_size // num_heads)
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    bias = fields.get("attention_bias", bool, False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
        key_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope_spec(rope, theta=fields.get("rope_theta", float, 10_000.0), rotary_dim=head_dim),
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = DenseMlp(
        fields.get("intermediate_size", int),
        fields.get("hidden_act", str, "silu"),
        fields.get("mlp_bias", bool, False),
    )
    return ModelDescription(
        family="llama",
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden_size,
        layers=(LayerSpec(attention, mlp),) * fields.get("num_hidden_layers", int),
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        max_model_len=fields.get("max_position_embeddings", int, 2048),
        tied_embeddings=fields.get("tie_word_embeddings", bool, False),
        eos_token_ids=eos_token_ids(fields),
    )


FAMILIES.register("llama")(Family(name="llama", describe=describe, components=DECODER_COMPONENTS))
