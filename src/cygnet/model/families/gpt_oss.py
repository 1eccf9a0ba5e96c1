"""gpt-oss: SWA and full layers in turn, sinks in all of them, YaRN, a mixture of clamped experts (often in MXFP4)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cygnet.base.errors import ModelLoadError
from cygnet.model.checkpoint import StoredTensor
from cygnet.model.config_json import ConfigFields, eos_token_ids, rope_spec
from cygnet.model.description import AttentionSpec, LayerSpec, ModelDescription, MoeSpec
from cygnet.model.registry import DECODER_COMPONENTS, FAMILIES, Family

if TYPE_CHECKING:
    from torch import Tensor

_THETA = 150_000.0
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""What a config without rope settings means."""


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Read a `gpt_oss` config.json."""
    fields = ConfigFields(config)
    mlp = _mlp(fields)
    return ModelDescription(
        family="gpt_oss",
        vocab_size=fields.get("vocab_size", int),
        hidden_size=fields.get("hidden_size", int),
        layers=tuple(
            LayerSpec(_attention(fields, full), mlp)
            for full in _full_pattern(fields, fields.get("num_hidden_layers", int))
        ),
        norm_eps=fields.get("rms_norm_eps", float, 1e-5),
        max_model_len=fields.get("max_position_embeddings", int, 131_072),
        tied_embeddings=fields.get("tie_word_embeddings", bool, False),
        eos_token_ids=eos_token_ids(fields),
    )


def _full_pattern(fields: ConfigFields, num_layers: int) -> list[bool]:
    types = fields.per_layer("layer_types", num_layers)
    if types is not None:
        return [kind == "full_attention" for kind in types]
    return [index % 2 == 1 for index in range(num_layers)]


def _attention(fields: ConfigFields, full: bool) -> AttentionSpec:
    head_dim, num_heads = fields.get("head_dim", int, 64), fields.get("num_attention_heads", int)
    bias = fields.get("attention_bias", bool, True)
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if not rope.fields:
        rope = ConfigFields(_YARN)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
        key_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope_spec(rope, theta=fields.get("rope_theta", float, _THETA), rotary_dim=head_dim),
        # `sliding_window` counts the query's own key, our window only earlier ones.
        window=None if full else fields.get("sliding_window", int, 128) - 1,
        sinks=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def _mlp(fields: ConfigFields) -> MoeSpec:
    fields.reject("hidden_act", "silu")
    fields.reject("swiglu_alpha", 1.702)
    return MoeSpec(
        num_experts=fields.get("num_local_experts", int),
        top_k=fields.get("num_experts_per_tok", int),
        intermediate_size=fields.get("intermediate_size", int),
        activation="quick_gelu",
        scoring="softmax",
        router_bias=True,
        bias=True,
        limit=fields.get("swiglu_limit", float, 7.0),
        up_offset=1.0,
    )


_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
_DIMS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


def unpack(tensors: Iterator[StoredTensor]) -> Iterator[StoredTensor]:
    """Split what is stored for all experts at once: `experts.gate_up_proj` into `experts.3.up_proj.weight` and so on.

    Plain weights are [experts, in, out]; packed ones are a pair `_blocks`, `_scales` for [experts, out, in], and are
    dequantised expert by expert, so that temporary memory is one expert's. Raises `ModelLoadError` for half a pair.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor, num_bytes in tensors:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor, num_bytes
            continue
        experts, projection, part = match.groups()
        if tensor.dim() != _DIMS[part]:
            raise ModelLoadError(f"tensor {name} has {tensor.dim()} dimensions, it should have {_DIMS[part]}")
        if part == "_bias":
            yield from _by_expert(experts, projection, "bias", tensor, num_bytes // len(tensor))
        elif part == "":
            yield from _by_expert(experts, projection, "weight", tensor.transpose(1, 2), num_bytes // len(tensor))
        else:
            weight = name.removesuffix(part)
            pair = halves.setdefault(weight, {})
            pair[part] = tensor
            if len(pair) == 2:
                del halves[weight]
                share = sum(half.nbytes for half in pair.values()) // len(tensor)
                rows = _dequantised(weight, pair["_blocks"], pair["_scales"])
                yield from _by_expert(experts, projection, "weight", rows, share)
    for weight, pair in halves.items():
        raise ModelLoadError(f"of {weight}_blocks and {weight}_scales the checkpoint has only {weight}{''.join(pair)}")


def _dequantised(weight: str, blocks: "Tensor", scales: "Tensor") -> Iterator["Tensor"]:
    """Each expert's weight [out, in], bf16, in turn."""
    from cygnet.model.mxfp4 import BLOCK_BYTES, dequantise

    if blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise ModelLoadError(
            f"{weight}: blocks of shape {tuple(blocks.shape)} and scales of shape {tuple(scales.shape)} don't fit"
        )
    return (dequantise(*expert) for expert in zip(blocks, scales, strict=True))


def _by_expert(
    experts: str, projection: str, kind: str, rows: "Iterable[Tensor]", num_bytes: int
) -> Iterator[StoredTensor]:
    """Name the `rows` (weight [out, in] or bias [out]) of each expert; `num_bytes` is what one expert takes up.

    Rows of gate and up alternate, gate first.
    """
    for index, tensor in enumerate(rows):
        if projection == "down":
            yield f"{experts}.{index}.down_proj.{kind}", tensor, num_bytes
        else:
            yield f"{experts}.{index}.gate_proj.{kind}", tensor[0::2], num_bytes // 2
            yield f"{experts}.{index}.up_proj.{kind}", tensor[1::2], num_bytes // 2


FAMILIES.register("gpt_oss")(
    Family(
        name="gpt_oss",
        describe=describe,
        components=DECODER_COMPONENTS,
        unpack=unpack,
        quantisations=frozenset({"mxfp4"}),
    )
)
