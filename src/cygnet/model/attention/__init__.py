"""Attention backends. Each file that defines one registers it; importing this package registers them all."""

from cygnet.model.attention import numba_cpu, reference, torch_cpu, triton_paged
from cygnet.model.attention.backend import ATTENTION_BACKENDS, AttentionBackend, AttentionPlan, select_backend

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionPlan",
    "numba_cpu",
    "reference",
    "select_backend",
    "torch_cpu",
    "triton_paged",
]
