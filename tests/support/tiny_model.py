"""A tiny hybrid model with random weights, made without a checkpoint."""

import torch

from cygnet.model.attention.backend import AttentionBackend
from cygnet.model.decoder import HybridModel
from cygnet.model.description import AttentionSpec, DenseMlp, LayerSpec, ModelDescription, MoeSpec, RopeSpec
from cygnet.model.ops import StepOps, TorchOps

WINDOW = 9


def tiny_model(
    backend: AttentionBackend, ops: StepOps | None = None, *, seed: int = 0, mlp: DenseMlp | None = None
) -> HybridModel:
    """Full and SWA layers of unlike KV heads, K unlike V, sinks, q/k norms, sandwich norms, a dense and a MoE MLP, or
    `mlp` in place of the latter."""
    rope = RopeSpec(1e4, 8)
    full = AttentionSpec(4, 1, 16, 8, 0.25, rope, qk_norm=True)
    swa = AttentionSpec(4, 2, 16, 8, 0.25, rope, window=WINDOW, sinks=True, value_scale=0.7)
    moe = mlp or MoeSpec(4, 2, 12, "silu", "sigmoid", selection_bias=True)
    dense = DenseMlp(24, "gelu_pytorch_tanh")
    description = ModelDescription(
        family="tiny",
        vocab_size=50,
        hidden_size=20,
        layers=(
            LayerSpec(swa, dense, sandwich_norms=True),
            LayerSpec(full, moe),
            LayerSpec(swa, moe),
            LayerSpec(full, dense),
        ),
        norm_eps=1e-6,
        max_model_len=256,
        tied_embeddings=True,
    )
    model = HybridModel(
        description, dtype=torch.float32, device=torch.device("cpu"), attention_backend=backend, ops=ops or TorchOps()
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    model.finish_loading()
    return model.eval()
