"""transformers' model of the real Gemma 3 270M."""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from cygnet.model.source import ModelSource


def gemma_oracle(source: ModelSource) -> Gemma3ForCausalLM:
    """In fp32, with weights from our reading of the GGUF file (which `tests/model/test_gguf.py` checks)."""
    checkpoint = source.checkpoint(dtype=torch.float32)
    config = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    oracle = Gemma3ForCausalLM(Gemma3TextConfig(**config)).eval()
    left = oracle.load_state_dict({name: tensor for name, tensor, _ in checkpoint.tensors()}, strict=False)
    assert set(left.missing_keys) <= {"lm_head.weight"}
    assert left.unexpected_keys == []
    oracle.tie_weights()
    return oracle
