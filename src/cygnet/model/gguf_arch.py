"""GGUF architectures: for each, how metadata becomes a Hugging Face config and tensors become Hugging Face tensors.

llama.cpp stores some values differently from the Hugging Face checkpoint it converts. A table here names, per tensor,
the Hugging Face name and the function that undoes the difference:

* `llama`: rows of q_proj and k_proj are permuted, so that a rotary pair (i, i + d/2) lies in adjacent rows
  (2i, 2i + 1).
* `gemma3`: norm weights are stored with the 1 added that Gemma's norm adds at run time.
* `gpt-oss`: gate and up rows of the experts, which alternate in the checkpoint, are two tensors. They are given out
  under the names that experts stored one by one have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING, Any

import numpy as np

from cygnet.base.errors import ModelLoadError
from cygnet.base.registry import Registry
from cygnet.model.gguf_file import GgufFile

if TYPE_CHECKING:
    from torch import Tensor

Config = dict[str, Any]
Undo = Callable[["Tensor", Config], "Tensor"]


@dataclass(frozen=True)
class GgufArch:
    """One architecture. `tensors` maps GGUF names to (Hugging Face name, function that undoes the convention or None).

    `{i}` in a name stands for the layer's number, `{e}` for an expert's: such a tensor holds expert after expert, and
    each is given out as a tensor of its own. `ignored` lists tensors that the config already accounts for.
    """

    config: Callable[[GgufFile], Config]
    tensors: Mapping[str, tuple[str, Undo | None]]
    ignored: frozenset[str] = frozenset()


GGUF_ARCHS: Registry[GgufArch] = Registry("GGUF architecture")


def gguf_arch(file: GgufFile) -> GgufArch:
    """The entry for `file`; `ModelLoadError` lists what is supported if there is none."""
    name = file.require("general.architecture")
    if name not in GGUF_ARCHS:
        raise ModelLoadError(
            f"GGUF file {file.path} holds a {name!r} model; of GGUF files Cygnet reads {', '.join(GGUF_ARCHS)}. "
            "Use the model's Hugging Face folder (config.json and *.safetensors) instead"
        )
    return GGUF_ARCHS.get(name)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-06 for a stored 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _common_config(file: GgufFile, arch: str) -> Config:
    """The keys that every decoder's config.json has, from metadata under the prefix `arch`."""

    def need(key: str) -> Any:
        return file.require(f"{arch}.{key}")

    hidden, heads = need("embedding_length"), need("attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"GGUF file {file.path} has no token_embd.weight tensor; is it a projector or an adapter?")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(file.get(f"{arch}.{key}"), np.ndarray):
            raise ModelLoadError(f"GGUF file {file.path}: {arch}.{key} differs by layer, which is not supported")
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": file.get(f"{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": shortest(need("attention.layer_norm_rms_epsilon")),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[key] = token
    return config


def _metadata_rope_scaling(file: GgufFile, arch: str) -> Config | None:
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelLoadError(
            f"GGUF file {file.path}: rope scaling {kind!r} is not supported from GGUF; use the Hugging Face folder"
        )
    return {"rope_type": "linear", "factor": shortest(file.require(f"{arch}.rope.scaling.factor"))}


# -- gemma3 ----------------------------------------------------------------------------------------------------------

GEMMA3_PATTERN = 6
"""Every sixth layer attends to everything. Implied by the architecture: the file has no key for it."""
GEMMA3_LOCAL_ROPE_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62


def _gemma3_config(file: GgufFile) -> Config:
    config = _common_config(file, "gemma3")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    pattern = file.get("gemma3.attention.sliding_window_pattern", GEMMA3_PATTERN)
    # The 27B model scales queries by hidden_size / heads, the others by head_dim; the file has no key for that either.
    scalar = config["hidden_size"] // heads if layers == _GEMMA3_27B_LAYERS else config["head_dim"]
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.require("gemma3.attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "rope_theta": shortest(file.get("gemma3.rope.freq_base", 1e6)),
        "rope_local_base_freq": shortest(file.get("gemma3.rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE)),
        "rope_scaling": _metadata_rope_scaling(file, "gemma3"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping"),
    }


def _minus_one(weight: "Tensor", config: Config) -> "Tensor":
    return weight - 1


_ATTENTION: dict[str, tuple[str, Undo | None]] = {
    "token_embd.weight": ("model.embed_tokens.weight", None),
    "output.weight": ("lm_head.weight", None),
    "blk.{i}.attn_v.weight": ("model.layers.{i}.self_attn.v_proj.weight", None),
    "blk.{i}.attn_output.weight": ("model.layers.{i}.self_attn.o_proj.weight", None),
    "blk.{i}.ffn_gate.weight": ("model.layers.{i}.mlp.gate_proj.weight", None),
    "blk.{i}.ffn_up.weight": ("model.layers.{i}.mlp.up_proj.weight", None),
    "blk.{i}.ffn_down.weight": ("model.layers.{i}.mlp.down_proj.weight", None),
}

GGUF_ARCHS.register("gemma3")(
    GgufArch(
        _gemma3_config,
        _ATTENTION
        | {
            "output_norm.weight": ("model.norm.weight", _minus_one),
            "blk.{i}.attn_q.weight": ("model.layers.{i}.self_attn.q_proj.weight", None),
            "blk.{i}.attn_k.weight": ("model.layers.{i}.self_attn.k_proj.weight", None),
            "blk.{i}.attn_q_norm.weight": ("model.layers.{i}.self_attn.q_norm.weight", _minus_one),
            "blk.{i}.attn_k_norm.weight": ("model.layers.{i}.self_attn.k_norm.weight", _minus_one),
            "blk.{i}.attn_norm.weight": ("model.layers.{i}.input_layernorm.weight", _minus_one),
            "blk.{i}.post_attention_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight", _minus_one),
            "blk.{i}.ffn_norm.weight": ("model.layers.{i}.pre_feedforward_layernorm.weight", _minus_one),
            "blk.{i}.post_ffw_norm.weight": ("model.layers.{i}.post_feedforward_layernorm.weight", _minus_one),
        },
    )
)


# -- llama -----------------------------------------------------------------------------------------------------------


def _llama_config(file: GgufFile) -> Config:
    if "llama.expert_count" in file and file.get("llama.expert_count"):
        raise ModelLoadError(f"GGUF file {file.path}: a mixture of experts is not supported from GGUF")
    config = _common_config(file, "llama")
    base = shortest(file.get("llama.rope.freq_base", 10000.0))
    factors = file.tensors.get("rope_freqs.weight")
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": base,
        "rope_scaling": (
            _metadata_rope_scaling(file, "llama")
            if factors is None
            else llama3_scaling(file.raw(factors).reshape(-1).view("<f4"), base, file)
        ),
    }


def llama3_scaling(factors: np.ndarray, base: float, file: GgufFile) -> Config:
    """The `rope_scaling` dict whose frequency factors are `factors` [head_dim / 2].

    The file keeps only the factors. Llama 3.1 and later differ in `factor` alone, which is the largest of them; the
    other three numbers are constants of the family. The result is checked against every stored factor.
    """
    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    wavelength = 2 * pi * base ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise ModelLoadError(
            f"GGUF file {file.path}: rope_freqs.weight is not Llama 3 scaling; use the Hugging Face folder"
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 3),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def unpermute(weight: "Tensor", num_heads: int) -> "Tensor":
    """Rows of a llama.cpp q or k projection (weight or bias), back in Hugging Face's order.

    Per head, row 2i + h of the file is row h * d/2 + i of the checkpoint (h in {0, 1}).
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _unpermute_q(weight: "Tensor", config: Config) -> "Tensor":
    return unpermute(weight, config["num_attention_heads"])


def _unpermute_k(weight: "Tensor", config: Config) -> "Tensor":
    return unpermute(weight, config["num_key_value_heads"])


GGUF_ARCHS.register("llama")(
    GgufArch(
        _llama_config,
        _ATTENTION
        | {
            "output_norm.weight": ("model.norm.weight", None),
            "blk.{i}.attn_q.weight": ("model.layers.{i}.self_attn.q_proj.weight", _unpermute_q),
            "blk.{i}.attn_k.weight": ("model.layers.{i}.self_attn.k_proj.weight", _unpermute_k),
            "blk.{i}.attn_q.bias": ("model.layers.{i}.self_attn.q_proj.bias", _unpermute_q),
            "blk.{i}.attn_k.bias": ("model.layers.{i}.self_attn.k_proj.bias", _unpermute_k),
            "blk.{i}.attn_v.bias": ("model.layers.{i}.self_attn.v_proj.bias", None),
            "blk.{i}.attn_output.bias": ("model.layers.{i}.self_attn.o_proj.bias", None),
            "blk.{i}.attn_norm.weight": ("model.layers.{i}.input_layernorm.weight", None),
            "blk.{i}.ffn_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight", None),
        },
        ignored=frozenset({"rope_freqs.weight"}),
    )
)


# -- gpt-oss ---------------------------------------------------------------------------------------------------------

GPT_OSS_PATTERN = 2
"""Every second layer attends to everything. Implied by the architecture, as are blends of the rotary frequencies that
are not rounded to whole dimensions."""


def _gpt_oss_config(file: GgufFile) -> Config:
    config = _common_config(file, "gpt-oss")

    def need(key: str) -> Any:
        return file.require(f"gpt-oss.{key}")

    scaling = file.get("gpt-oss.rope.scaling.type")
    if scaling != "yarn":
        raise ModelLoadError(f"GGUF file {file.path}: rope scaling {scaling!r} is not supported for gpt-oss (yarn is)")
    return config | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "intermediate_size": file.get("gpt-oss.expert_feed_forward_length", config["intermediate_size"]),
        "num_local_experts": need("expert_count"),
        "num_experts_per_tok": need("expert_used_count"),
        "sliding_window": need("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (i + 1) % GPT_OSS_PATTERN == 0 else "sliding_attention"
            for i in range(config["num_hidden_layers"])
        ],
        "rope_theta": shortest(need("rope.freq_base")),
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": shortest(need("rope.scaling.factor")),
            "original_max_position_embeddings": need("rope.scaling.original_context_length"),
            "truncate": False,
        },
    }


def _both(gguf: str, hugging_face: str) -> dict[str, tuple[str, Undo | None]]:
    """A layer's weight and bias."""
    return {
        f"blk.{{i}}.{gguf}.{kind}": (f"model.layers.{{i}}.{hugging_face}.{kind}", None) for kind in ("weight", "bias")
    }


GGUF_ARCHS.register("gpt-oss")(
    GgufArch(
        _gpt_oss_config,
        {
            "token_embd.weight": ("model.embed_tokens.weight", None),
            "output.weight": ("lm_head.weight", None),
            "output_norm.weight": ("model.norm.weight", None),
            "blk.{i}.attn_norm.weight": ("model.layers.{i}.input_layernorm.weight", None),
            "blk.{i}.post_attention_norm.weight": ("model.layers.{i}.post_attention_layernorm.weight", None),
            "blk.{i}.attn_sinks.weight": ("model.layers.{i}.self_attn.sinks", None),
            **_both("attn_q", "self_attn.q_proj"),
            **_both("attn_k", "self_attn.k_proj"),
            **_both("attn_v", "self_attn.v_proj"),
            **_both("attn_output", "self_attn.o_proj"),
            **_both("ffn_gate_inp", "mlp.router"),
            **_both("ffn_gate_exps", "mlp.experts.{e}.gate_proj"),
            **_both("ffn_up_exps", "mlp.experts.{e}.up_proj"),
            **_both("ffn_down_exps", "mlp.experts.{e}.down_proj"),
        },
    )
)
