"""Gemma 3: five SWA layers to one full layer, q/k norm, norms around each block, scaled embeddings."""

from collections.abc import Mapping
from typing import Any

from cygnet.base.errors import ModelLoadError
from cygnet.model.config_json import ConfigFields, eos_token_ids, rope_spec
from cygnet.model.description import AttentionSpec, DenseMlp, LayerSpec, ModelDescription, RopeSpec
from cygnet.model.registry import DECODER_COMPONENTS, FAMILIES, Family

_FULL_EVERY = 6
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def describe_text(config: Mapping[str, Any]) -> ModelDescription:
    """Read a `gemma3_text` config.json. Published configs leave fields out, so the family's defaults apply."""
    fields = ConfigFields(config)
    if fields.get("use_bidirectional_attention", bool, False):
        raise ModelLoadError("config.json: use_bidirectional_attention is set: an encoder, not a language model")
    fields.reject("attn_logit_softcapping")
    hidden_size = fields.get("hidden_size", int)
    mlp = DenseMlp(fields.get("intermediate_size", int), fields.get("hidden_activation", str, "gelu_pytorch_tanh"))
    layers = tuple(
        LayerSpec(_attention(fields, full), mlp, sandwich_norms=True)
        for full in _full_pattern(fields, fields.get("num_hidden_layers", int))
    )
    return ModelDescription(
        family="gemma3",
        vocab_size=fields.get("vocab_size", int, 262_208),
        hidden_size=hidden_size,
        layers=layers,
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        max_model_len=fields.get("max_position_embeddings", int, 131_072),
        tied_embeddings=fields.get("tie_word_embeddings", bool, True),
        norm_weight_offset=1.0,
        embedding_scale=hidden_size**0.5,
        logit_softcap=fields.get("final_logit_softcapping", float, 0.0) or None,
        eos_token_ids=eos_token_ids(fields),
    )


def describe_multimodal(config: Mapping[str, Any]) -> ModelDescription:
    """Read a `gemma3` config.json: its `text_config`, with the ids that stand one level up."""
    text = dict(ConfigFields(config).get("text_config", dict))
    for name in ("eos_token_id", "tie_word_embeddings"):
        if text.get(name) is None:
            text[name] = config.get(name)
    return describe_text(text)


def _full_pattern(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Per layer, whether it is a full-attention layer."""
    types = fields.per_layer("layer_types", num_layers)
    if types is not None:
        return [kind == "full_attention" for kind in types]
    every = fields.get("sliding_window_pattern", int, fields.get("_sliding_window_pattern", int, _FULL_EVERY))
    return [(index + 1) % every == 0 for index in range(num_layers)]


def _attention(fields: ConfigFields, full: bool) -> AttentionSpec:
    head_dim = fields.get("head_dim", int, 256)
    bias = fields.get("attention_bias", bool, False)
    return AttentionSpec(
        num_heads=fields.get("num_attention_heads", int, 8),
        num_kv_heads=fields.get("num_key_value_heads", int, 4),
        key_dim=head_dim,
        value_dim=head_dim,
        scale=fields.get("query_pre_attn_scalar", float, 256.0) ** -0.5,
        rope=_rope(fields, full, head_dim),
        # `sliding_window` counts the query's own key, our window only earlier ones.
        window=None if full else fields.get("sliding_window", int, 4096) - 1,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _rope(fields: ConfigFields, full: bool, head_dim: int) -> RopeSpec:
    """Scaling concerns the full layers only. Newer configs have one object per layer type, older ones flat fields."""
    parameters = fields.section("rope_parameters").section("full_attention" if full else "sliding_attention")
    if not full:
        return rope_spec(parameters, theta=fields.get("rope_local_base_freq", float, _LOCAL_THETA), rotary_dim=head_dim)
    if not parameters.fields:
        parameters = fields.section("rope_scaling")
    return rope_spec(parameters, theta=fields.get("rope_theta", float, _GLOBAL_THETA), rotary_dim=head_dim)


_COMPONENTS = {
    **DECODER_COMPONENTS,
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_VISION = "images are not served by the text model"

FAMILIES.register("gemma3_text")(Family(name="gemma3", describe=describe_text, components=_COMPONENTS))
FAMILIES.register("gemma3")(
    Family(
        name="gemma3",
        describe=describe_multimodal,
        components={**_COMPONENTS, "language_model": "language_model"},
        # Older files nest the text model as language_model.model, newer ones as model.language_model.
        prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
        ignored={
            prefix + part: _VISION for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
        },
    )
)
