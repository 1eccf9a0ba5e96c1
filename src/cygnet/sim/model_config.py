"""From a model's `config.json` to its facts. Reads more architectures than the engine serves, and less of each.

What can't be counted exactly is refused by name: a wrong plan is worse than none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cygnet.base.errors import ConfigError
from cygnet.sim.model_facts import AttentionFacts, ModelFacts, MoeFacts, SparseIndex, WeightBytes

_MXFP4 = 0.5 + 1 / 32
"""Bytes per weight: four bits, and a scale of eight for each 32."""


@dataclass(frozen=True)
class Conventions:
    """What a `model_type` leaves unsaid in its config.json."""

    window_counts_self: bool = True
    """Whether `sliding_window` counts the query's own key."""
    full_every: int = 0
    """Every n-th layer is full where no per-layer list says otherwise; 0: all are."""
    head_dim: int = 0
    """0: hidden size / heads."""
    num_heads: int = 0
    num_kv_heads: int = 0
    vocab_size: int = 0
    max_model_len: int = 0
    tied: bool = False
    high_precision_output: bool = False
    """Whether quantised checkpoints keep the attention's output projection in 16 bits."""


_GEMMA3 = Conventions(
    full_every=6, head_dim=256, num_heads=8, num_kv_heads=4, vocab_size=262_208, max_model_len=131_072, tied=True
)
_MIMO = Conventions(window_counts_self=False, high_precision_output=True)
CONVENTIONS: Mapping[str, Conventions] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_oss": Conventions(full_every=2, head_dim=64, max_model_len=131_072),
    "mimo_v2": _MIMO,
    "mimo_v2_flash": _MIMO,
    "glm4_moe": Conventions(head_dim=128),
}
"""By `model_type`; a type that is not here has none."""

UNCOUNTABLE = {
    "compress_ratios": "its layers compress their KV at different rates (DeepSeek-V4)",
    "linear_num_key_heads": "it has linear-attention layers",
    "mamba_d_state": "it has state-space layers",
    "linear_attn_config": "it has linear-attention layers",
}
"""Fields of architectures whose cache is not a fixed number of bytes per token and layer."""


class _Fields:
    """Fields of one config; null counts as absent."""

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self._fields, self._name = fields, name

    def has(self, *names: str) -> bool:
        return any(self._fields.get(name) is not None for name in names)

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of the fields `names` that is there."""
        for name in names:
            value = self._fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{self._name}: {name} = {value!r} should be a whole number")
            return value
        if default is None:
            raise ConfigError(f"{self._name}: config.json lacks {' or '.join(names)}")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self._fields.get(name)
        return default if value is None else bool(value)

    def word(self, name: str, default: str = "") -> str:
        return str(self._fields.get(name) or default)

    def section(self, name: str) -> Mapping[str, Any]:
        value = self._fields.get(name) or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._name}: {name} should be an object")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        value = self._fields.get(name)
        if not isinstance(value, list):
            return None
        if len(value) != num_layers:
            raise ConfigError(f"{self._name}: {name} has {len(value)} entries for {num_layers} layers")
        return value


def facts_from_config(
    config: Mapping[str, Any], *, name: str, source: str, weight_bytes: float | None = None
) -> ModelFacts:
    """The facts of the (text) model that `config` describes.

    `weight_bytes` overrides what the config says of quantisation, for all weights. Raises `ConfigError` for a missing
    field and for an architecture that can't be counted.
    """
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, Mapping) else dict(config)
    fields = _Fields(merged, name)
    for field, reason in UNCOUNTABLE.items():
        if fields.has(field):
            raise ConfigError(f"{name} can't be planned for: {reason}")
    rules = CONVENTIONS.get(fields.word("model_type"), Conventions())
    num_layers = fields.number("num_hidden_layers")
    is_full = _full_layers(fields, num_layers, rules, name)
    full, swa = sum(is_full), num_layers - sum(is_full)
    if full == 0:
        raise ConfigError(f"{name} can't be planned for: it has no full-attention layer")
    is_sparse = _sparse_layers(fields, num_layers)
    hidden = fields.number("hidden_size")
    return ModelFacts(
        name=name,
        source=source,
        hidden_size=hidden,
        vocab_size=fields.number("vocab_size", default=rules.vocab_size or None),
        tied_embeddings=fields.flag("tie_word_embeddings", rules.tied),
        max_model_len=fields.number("max_position_embeddings", default=rules.max_model_len or None),
        full=_latent(fields, full, hidden)
        if fields.has("kv_lora_rank")
        else _grouped(fields, rules, full, hidden, windowed=False),
        swa=_grouped(fields, rules, swa, hidden, windowed=True) if swa else None,
        dense_layers=num_layers - sum(is_sparse),
        dense_parameters=3 * hidden * fields.number("intermediate_size") if not all(is_sparse) else 0,
        moe=_moe(fields, sum(is_sparse), hidden) if any(is_sparse) else None,
        weight_bytes=_weight_bytes(fields, rules, name, weight_bytes),
    )


def _full_layers(fields: _Fields, num_layers: int, rules: Conventions, name: str) -> list[bool]:
    if 0 in (fields.per_layer("attn_type_list", num_layers) or ()):
        raise ConfigError(f"{name} can't be planned for: it has linear-attention layers")
    types = fields.per_layer("layer_types", num_layers)
    if types is not None:
        known = {"full_attention": True, "sliding_attention": False}
        for kind in types:
            if kind not in known:
                raise ConfigError(f"{name} can't be planned for: it has layers of type {kind!r}")
        return [known[kind] for kind in types]
    pattern = fields.per_layer("hybrid_layer_pattern", num_layers)
    if pattern is not None:
        return [kind == 0 for kind in pattern]
    every = fields.number("sliding_window_pattern", default=rules.full_every)
    if every:
        return [(index + 1) % every == 0 for index in range(num_layers)]
    windowed = fields.has("sliding_window") and fields.flag("use_sliding_window", True)
    return [not windowed] * num_layers


def _sparse_layers(fields: _Fields, num_layers: int) -> list[bool]:
    if not fields.has("n_routed_experts", "num_experts", "num_local_experts"):
        return [False] * num_layers
    types = fields.per_layer("mlp_layer_types", num_layers)
    if types is not None:
        return [kind == "sparse" for kind in types]
    frequency = fields.per_layer("moe_layer_freq", num_layers)
    if frequency is not None:
        return [kind == 1 for kind in frequency]
    dense = fields.number("first_k_dense_replace", default=0)
    return [index >= dense for index in range(num_layers)]


def _grouped(fields: _Fields, rules: Conventions, num_layers: int, hidden: int, *, windowed: bool) -> AttentionFacts:
    """Layers whose query heads share KV heads. Fields named `swa_...` hold for windowed layers alone."""
    own = "swa_" if windowed else ""
    heads = fields.number(f"{own}num_attention_heads", "num_attention_heads", default=rules.num_heads or None)
    kv_heads = fields.number(f"{own}num_key_value_heads", "num_key_value_heads", default=rules.num_kv_heads or heads)
    key = fields.number(f"{own}head_dim", "head_dim", default=rules.head_dim or hidden // heads)
    value = fields.number(f"{own}v_head_dim", "v_head_dim", default=key)
    window = None
    if windowed:
        window = fields.number("sliding_window_size", "sliding_window") - int(rules.window_counts_self)
    return AttentionFacts(
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        key_dim=key,
        value_dim=value,
        score_dim=key,
        mix_dim=value,
        decode_score_dim=key,
        decode_mix_dim=value,
        parameters_in=hidden * (heads * key + kv_heads * (key + value)),
        parameters_out=hidden * heads * value,
        window=window,
    )


def _latent(fields: _Fields, num_layers: int, hidden: int) -> AttentionFacts:
    """Multi-head latent attention, with DeepSeek-V3.2's index of keys if there is one."""
    heads, latent = fields.number("num_attention_heads"), fields.number("kv_lora_rank")
    nope, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    value = fields.number("v_head_dim")
    low = fields.number("q_lora_rank", default=0)
    queries = hidden * low + low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
    parameters = queries + hidden * (latent + rope) + latent * heads * (nope + value)
    index = None
    if fields.has("index_topk"):
        index = SparseIndex(
            fields.number("index_n_heads"), fields.number("index_head_dim"), fields.number("index_topk")
        )
        parameters += low * index.num_heads * index.dim + hidden * (index.dim + index.num_heads)
    return AttentionFacts(
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=1,
        key_dim=latent + rope + (index.dim if index else 0),
        value_dim=0,
        score_dim=nope + rope,
        mix_dim=value,
        decode_score_dim=latent + rope,
        decode_mix_dim=latent,
        parameters_in=parameters,
        parameters_out=hidden * heads * value,
        index=index,
        shardable=False,
    )


def _moe(fields: _Fields, num_layers: int, hidden: int) -> MoeFacts:
    experts = fields.number("n_routed_experts", "num_experts", "num_local_experts")
    width = fields.number("moe_intermediate_size", "intermediate_size")
    expert = 3 * hidden * width
    shared = fields.number("n_shared_experts", default=0) * expert
    return MoeFacts(num_layers, experts, fields.number("num_experts_per_tok"), expert, shared + hidden * experts)


def _weight_bytes(fields: _Fields, rules: Conventions, name: str, override: float | None) -> WeightBytes:
    plain = 4.0 if fields.word("torch_dtype", fields.word("dtype")) == "float32" else 2.0
    if override is not None:
        return WeightBytes(override, override, override, override, override)
    quantisation = fields.section("quantization_config")
    method = quantisation.get("quant_method")
    if method is None:
        return WeightBytes(plain, plain, plain, plain, plain)
    if method == "fp8":
        return WeightBytes(1.0, plain if rules.high_precision_output else 1.0, 1.0, 1.0, plain)
    if method == "mxfp4":
        return WeightBytes(plain, plain, plain, _MXFP4, plain)
    raise ConfigError(f"{name}: quantisation {method!r} is not known; give the bits per weight with --weight-bits")
