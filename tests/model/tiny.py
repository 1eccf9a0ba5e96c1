"""Tiny random models of every family, with transformers as the oracle. No weights are downloaded."""

from dataclasses import dataclass

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    PreTrainedModel,
)

from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from model.harness import FolderCheckpoint

VOCAB = 160
FULL, SWA = "full_attention", "sliding_attention"


def gemma3() -> PreTrainedModel:
    """8 layers, of which the sixth is full; window of 10 earlier keys; 2 KV heads; scaled global rope."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=11,
        max_position_embeddings=512,
        final_logit_softcapping=30.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    return randomise(Gemma3ForCausalLM(config))


def mimo() -> PreTrainedModel:
    """7 layers, three of them full; window of 12 earlier keys; K dim 24, V dim 16; sinks; 1 dense and 6 MoE MLPs."""
    config = MiMoV2FlashConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        v_head_dim=16,
        sliding_window=13,
        n_routed_experts=6,
        num_experts_per_tok=2,
        layer_types=[FULL, SWA, SWA, SWA, FULL, SWA, FULL],
        max_position_embeddings=512,
    )
    return randomise(MiMoV2FlashForCausalLM(config))


def gpt_oss() -> PreTrainedModel:
    """6 layers, every other one full; window of 11 earlier keys; sinks in all layers; YaRN; biases; 5 experts."""
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=12,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    )
    return randomise(GptOssForCausalLM(config))


def llama(**overrides: object) -> PreTrainedModel:
    """3 full layers with llama3 rope scaling and biases."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    return randomise(LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})))


@dataclass(frozen=True)
class Tiny:
    """One tiny model: transformers' own and the checkpoint it saved."""

    oracle: PreTrainedModel
    checkpoint: FolderCheckpoint

    def build(self, dtype: torch.dtype = torch.float32, backend: str = "auto", kernels: str = "auto") -> HybridModel:
        return build_model(self.checkpoint, dtype=dtype, attention_backend=backend, step_kernels=kernels)


FAMILIES = {"gemma3": gemma3, "mimo": mimo, "gpt_oss": gpt_oss, "llama": llama}


@torch.no_grad()
def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("inv_freq", "embed_scale")):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "sinks" in name or "correction_bias" in name:
            tensor.copy_(noise * 0.5)
        elif "norm" in name:
            tensor.add_(noise * 0.2)
        elif tensor.dim() == 1:
            tensor.copy_(noise * 0.1)
        else:
            tensor.copy_(noise * 1.5 * tensor.shape[-1] ** -0.5)
    return model.eval()
