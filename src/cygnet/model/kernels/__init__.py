"""Fused kernels for GPUs, written in Triton, and the small interface by which `ops.TritonOps` uses them.

Nothing here imports Triton until a kernel is needed.

**Not run on a GPU.** The kernels are checked in Triton's interpreter, on the CPU, against plain PyTorch code, and
compiled for several GPU architectures without being run there; see docs/gpu.md.
"""

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from cygnet.base.errors import ConfigError
from cygnet.model.description import MoeSpec

REMEDY = "install it with: pip install 'cygnet[gpu]'"

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels read and write; they sum in fp32."""


@dataclass(frozen=True)
class MoeParameters:
    """What a mixture of experts has learned, but for its router's weights."""

    gate_up: Tensor
    """[num_experts, 2 * size, hidden]"""
    down: Tensor
    """[num_experts, hidden, size]"""
    selection_bias: Tensor | None = None
    """[num_experts] fp32"""
    gate_up_bias: Tensor | None = None
    """[num_experts, 2 * size]"""
    down_bias: Tensor | None = None
    """[num_experts, hidden]"""


class Kernels(Protocol):
    """What layers may have done by fused kernels. Every method equals the plain code it stands in for, up to rounding.

    `T` is the number of tokens. No input is changed unless the method says so.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension of `x` [..., size] or [..., rows, size].

        `weight` is [size] or [rows, size]; the result is contiguous and in x's dtype.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(s, rms_norm(s)) for s = x + residual, both [T, size], rounded to x's dtype before the norm."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`cygnet.model.rope.rotate` of `heads` [T, num_heads, head_dim] by `cos`, `sin` [T, 1, rotary_dim / 2]."""

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, [..., size], for `x` [..., 2 * size] = [gate | up]."""

    def supports_activation(self, activation: str) -> bool:
        """Whether `gated` and `moe` know the activation of that name."""

    def moe(self, spec: MoeSpec, x: Tensor, logits: Tensor, parameters: MoeParameters) -> Tensor:
        """Routed experts' output [T, hidden] for `x` [T, hidden] and the router's `logits` [T, num_experts] in fp32.

        Does not wait for the GPU.
        """


def triton_available() -> bool:
    """Whether Triton can be imported; found out without importing it."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def require_triton() -> None:
    """Raises `ConfigError` where kernels can't run, with the remedy."""
    if not triton_available():
        raise ConfigError(f"the Triton kernels need the package triton, which is not installed; {REMEDY}")
    if not torch.cuda.is_available() and not interpreted():
        raise ConfigError(
            "the Triton kernels need a GPU, and torch sees none here; use engine.attention_backend = 'auto'"
        )


@lru_cache(maxsize=1)
def triton_kernels() -> Kernels:
    """The kernels, wherever they run. Raises `ConfigError` where they can't."""
    require_triton()
    from cygnet.model.kernels.fused import TritonKernels

    return TritonKernels()
