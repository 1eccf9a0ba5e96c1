"""MiMo-V2: few full layers among many SWA layers with sinks, K and V heads of different size, MoE.

Two spellings of the config exist: the checkpoints' own (`hybrid_layer_pattern`, `moe_layer_freq`, `swa_*`), and the one
the transformers library writes (`layer_types`, `mlp_layer_types`, `rope_parameters`).
"""

from collections.abc import Mapping
from typing import Any

from cygnet.base.errors import ModelLoadError
from cygnet.model.config_json import ConfigFields, eos_token_ids, rope_spec
from cygnet.model.description import AttentionSpec, DenseMlp, LayerSpec, ModelDescription, MoeSpec, RopeSpec
from cygnet.model.registry import DECODER_COMPONENTS, FAMILIES, Family

_ROTARY_FACTOR = 0.334
_GLOBAL_THETA, _LOCAL_THETA = 5_000_000.0, 10_000.0


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Read a `mimo_v2_flash` or `mimo_v2` config.json; encoders beside the text model are left out."""
    fields = ConfigFields(config)
    num_layers = fields.get("num_hidden_layers", int)
    attention = {full: _attention(fields, full) for full in (True, False)}
    mlp = {sparse: _mlp(fields, sparse) for sparse in (True, False)}
    full_pattern, sparse_pattern = _full_pattern(fields, num_layers), _sparse_pattern(fields, num_layers)
    return ModelDescription(
        family="mimo_v2",
        vocab_size=fields.get("vocab_size", int),
        hidden_size=fields.get("hidden_size", int),
        layers=tuple(
            LayerSpec(attention[full], mlp[sparse]) for full, sparse in zip(full_pattern, sparse_pattern, strict=True)
        ),
        norm_eps=fields.get("layernorm_epsilon", float, fields.get("rms_norm_eps", float, 1e-5)),
        max_model_len=fields.get("max_position_embeddings", int),
        tied_embeddings=fields.get("tie_word_embeddings", bool, False),
        eos_token_ids=eos_token_ids(fields),
    )


def check_weights(config: Mapping[str, Any]) -> None:
    """Only separate q, k and v projections can be loaded."""
    layout = config.get("attention_projection_layout")
    if layout not in (None, "split", "split_qkv"):
        raise ModelLoadError(
            f"config.json: attention_projection_layout = {layout!r}: q, k and v are stored interleaved per "
            "tensor-parallel shard, which can't be loaded; convert the checkpoint to separate q_proj, k_proj, v_proj"
        )


def _full_pattern(fields: ConfigFields, num_layers: int) -> list[bool]:
    types = fields.per_layer("layer_types", num_layers)
    if types is not None:
        return [kind == "full_attention" for kind in types]
    pattern = fields.per_layer("hybrid_layer_pattern", num_layers)
    if pattern is not None:
        return [kind == 0 for kind in pattern]
    return [index == 0 or (index + 1) % 6 == 0 for index in range(num_layers)]


def _sparse_pattern(fields: ConfigFields, num_layers: int) -> list[bool]:
    types = fields.per_layer("mlp_layer_types", num_layers)
    if types is not None:
        return [kind == "sparse" for kind in types]
    pattern = fields.per_layer("moe_layer_freq", num_layers)
    return [bool(kind) for kind in pattern] if pattern is not None else [index > 0 for index in range(num_layers)]


def _attention(fields: ConfigFields, full: bool) -> AttentionSpec:
    num_heads, num_kv_heads = fields.get("num_attention_heads", int), fields.get("num_key_value_heads", int)
    key_dim, value_dim = fields.get("head_dim", int, 192), fields.get("v_head_dim", int, 128)
    if not full:
        num_heads = fields.get("swa_num_attention_heads", int, num_heads)
        # The library's spelling has no field for it: twice the full layers' count is built in there.
        num_kv_heads = fields.get("swa_num_key_value_heads", int, 2 * num_kv_heads)
        key_dim, value_dim = fields.get("swa_head_dim", int, key_dim), fields.get("swa_v_head_dim", int, value_dim)
    bias = fields.get("attention_bias", bool, False)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=key_dim**-0.5,
        rope=_rope(fields, full, key_dim),
        window=None if full else _window(fields),
        sinks=fields.get("add_full_attention_sink_bias" if full else "add_swa_attention_sink_bias", bool, not full),
        value_scale=fields.get("attention_value_scale", float, 1.0),
        qkv_bias=bias,
    )


def _window(fields: ConfigFields) -> int:
    """Earlier keys seen. The checkpoints' number means just that; the library's has the query's own key added."""
    if fields.has("sliding_window_size"):
        return fields.get("sliding_window_size", int)
    window = fields.get("sliding_window", int)
    return window if fields.has("hybrid_layer_pattern") else window - 1


def _rope(fields: ConfigFields, full: bool, key_dim: int) -> RopeSpec:
    parameters = fields.section("rope_parameters").section("full_attention" if full else "sliding_attention")
    factor = parameters.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, _ROTARY_FACTOR))
    if not parameters.fields and full:
        parameters = fields.section("rope_scaling")
    default = (
        fields.get("rope_theta", float, _GLOBAL_THETA) if full else fields.get("swa_rope_theta", float, _LOCAL_THETA)
    )
    return rope_spec(parameters, theta=default, rotary_dim=int(key_dim * factor))


def _mlp(fields: ConfigFields, sparse: bool) -> DenseMlp | MoeSpec:
    activation = fields.get("hidden_act", str, "silu")
    if not sparse:
        return DenseMlp(fields.get("intermediate_size", int), activation)
    fields.reject("scoring_func", "sigmoid")
    fields.reject("n_group", 1)
    fields.reject("topk_group", 1)
    fields.reject("n_shared_experts", 0)
    return MoeSpec(
        num_experts=fields.get("n_routed_experts", int),
        top_k=fields.get("num_experts_per_tok", int),
        intermediate_size=fields.get("moe_intermediate_size", int),
        activation=activation,
        scoring="sigmoid",
        selection_bias=True,
        norm_topk_prob=fields.get("norm_topk_prob", bool, True),
        routed_scaling=fields.get("routed_scaling_factor", float, 1.0),
    )


_FAMILY = Family(
    name="mimo_v2",
    describe=describe,
    components={
        **DECODER_COMPONENTS,
        "attention_sink_bias": "sinks",
        "gate": "router",
        "e_score_correction_bias": "selection_bias",
    },
    ignored={
        "model.mtp.": "multi-token prediction layers take no part in plain decoding",
        **dict.fromkeys(("visual.", "audio_encoder.", "speech_embeddings."), "only the text model is served"),
    },
    check_weights=check_weights,
)
FAMILIES.register("mimo_v2_flash")(_FAMILY)
FAMILIES.register("mimo_v2")(_FAMILY)
