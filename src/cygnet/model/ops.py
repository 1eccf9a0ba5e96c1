"""What a decoder layer does between its matrix products, as a table of implementations that register themselves."""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from cygnet.base.errors import ConfigError
from cygnet.base.registry import Registry
from cygnet.model.cpu.kernels import SUFFIX, numba_works
from cygnet.model.description import AttentionSpec, MoeSpec
from cygnet.model.kernels import FLOAT_DTYPES, MoeParameters, require_triton, triton_available
from cygnet.model.layers import RmsNorm, activation, gated, wide_dtype
from cygnet.model.rope import Cos, Sin, rotate

Activation = Callable[[Tensor], Tensor]


class StepOps(Protocol):
    """Norms, rotation and activations of one step. `T` is the model's dtype."""

    is_compiled: bool
    """Whether the work is calls of compiled kernels on the CPU, which `cpu.programs` can record."""

    def rope_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What `heads` wants cosines and sines in, for a model in `dtype`."""

    def join(
        self, residual: Tensor, branch: Tensor | None, post_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        """(x, norm(x)) for x = residual + post_norm(branch), all T [rows, hidden]; `residual` may be overwritten."""

    def heads(
        self, spec: AttentionSpec, qkv: Tensor, norm: RmsNorm | None, rope: tuple[Cos, Sin]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [rows, num_heads, key_dim] and key [rows, num_kv_heads, key_dim], normed and rotated, and the value
        [rows, num_kv_heads, value_dim], scaled, out of `qkv` T [rows, all of them side by side]."""

    def gated(self, x: Tensor, activation_name: str) -> Tensor:
        """act(gate) * up, T [rows, size], for `x` T [rows, 2 * size] = [gate | up]."""

    def experts(
        self, spec: MoeSpec, x: Tensor, logits: Callable[[Tensor], Tensor], learned: MoeParameters
    ) -> Tensor | None:
        """Routed experts' output T [rows, hidden] for `x` T [rows, hidden] and `logits(x)` [rows, num_experts] in fp32;
        `None` where the layer's own code is to be used."""

    def fuses_experts(self, spec: MoeSpec) -> bool:
        """Whether `experts` does the work itself, without waiting for the device."""

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [rows]: where each row of `x` T [rows, size] is largest; the first place of equals."""


STEP_OPS: Registry[Callable[[], StepOps]] = Registry("step kernels")


@STEP_OPS.register("torch")
class TorchOps:
    """Plain PyTorch, on any device."""

    is_compiled = False

    def rope_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def join(
        self, residual: Tensor, branch: Tensor | None, post_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        if branch is not None:
            residual = residual + (branch if post_norm is None else post_norm(branch))
        return residual, norm(residual)

    def heads(
        self, spec: AttentionSpec, qkv: Tensor, norm: RmsNorm | None, rope: tuple[Cos, Sin]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, qk_heads = qkv.shape[0], spec.num_heads + spec.num_kv_heads
        qk_size = qk_heads * spec.key_dim
        qk = qkv[:, :qk_size].view(rows, qk_heads, spec.key_dim)
        if norm is not None:
            qk = norm(qk)
        query, key = rotate(qk, *rope).split((spec.num_heads, spec.num_kv_heads), dim=1)
        return query, key, value_heads(spec, qkv)

    def gated(self, x: Tensor, activation_name: str) -> Tensor:
        return gated(x, activation(activation_name))

    def experts(
        self, spec: MoeSpec, x: Tensor, logits: Callable[[Tensor], Tensor], learned: MoeParameters
    ) -> Tensor | None:
        return None

    def fuses_experts(self, spec: MoeSpec) -> bool:
        return False

    def argmax(self, x: Tensor) -> Tensor:
        return x.to(wide_dtype(x.dtype)).argmax(dim=-1)  # several times faster than argmax in bf16


def value_heads(spec: AttentionSpec, qkv: Tensor) -> Tensor:
    """The value [rows, num_kv_heads, value_dim] at the end of `qkv`, scaled; a view if there is nothing to scale."""
    start = (spec.num_heads + spec.num_kv_heads) * spec.key_dim
    value = qkv[:, start:].view(qkv.shape[0], spec.num_kv_heads, spec.value_dim)
    return value if spec.value_scale == 1.0 else value * spec.value_scale


def select_ops(name: str, device: torch.device, dtype: torch.dtype) -> StepOps:
    """The step kernels called `name`; `auto` takes the fastest that work here. Raises `ConfigError` if unknown."""
    if name == "auto":
        if device.type == "cuda" and dtype in FLOAT_DTYPES and triton_available():
            name = "triton"
        else:
            name = "numba" if device.type == "cpu" and dtype in SUFFIX and numba_works() else "torch"
    if name == "numba":
        if not numba_works():
            raise ConfigError("step kernels 'numba' need numba: pip install 'cygnet[cpu]', or use 'torch'")
        import_module("cygnet.model.cpu.ops")
    if name == "triton":
        require_triton()
        import_module("cygnet.model.kernels.ops")
    return STEP_OPS.get(name)()
