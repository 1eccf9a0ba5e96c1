"""Step kernels in Triton. **Not run on a GPU**, see `cygnet.model.kernels`."""

from collections.abc import Callable

import torch
from torch import Tensor

from cygnet.model.description import AttentionSpec, MoeSpec
from cygnet.model.kernels import MoeParameters, triton_kernels
from cygnet.model.layers import RmsNorm
from cygnet.model.ops import STEP_OPS, TorchOps, value_heads
from cygnet.model.rope import Cos, Sin


@STEP_OPS.register("triton")
class TritonOps:
    """Each step in one or two kernels; activations without a kernel go to torch."""

    is_compiled = False

    def __init__(self) -> None:
        self._kernels = triton_kernels()
        self._torch = TorchOps()

    def rope_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def join(
        self, residual: Tensor, branch: Tensor | None, post_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        if branch is None:
            return residual, self._kernels.rms_norm(residual, norm.weight, norm.eps)
        if post_norm is not None:
            branch = self._kernels.rms_norm(branch, post_norm.weight, post_norm.eps)
        return self._kernels.add_rms_norm(branch, residual, norm.weight, norm.eps)

    def heads(
        self, spec: AttentionSpec, qkv: Tensor, norm: RmsNorm | None, rope: tuple[Cos, Sin]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, qk_heads = qkv.shape[0], spec.num_heads + spec.num_kv_heads
        qk = qkv[:, : qk_heads * spec.key_dim].view(rows, qk_heads, spec.key_dim)
        if norm is not None:
            qk = self._kernels.rms_norm(qk, norm.weight, norm.eps)
        query, key = self._kernels.rotate(qk, *rope).split((spec.num_heads, spec.num_kv_heads), dim=1)
        return query, key, value_heads(spec, qkv)

    def gated(self, x: Tensor, activation_name: str) -> Tensor:
        if self._kernels.supports_activation(activation_name):
            return self._kernels.gated(x, activation_name)
        return self._torch.gated(x, activation_name)

    def experts(
        self, spec: MoeSpec, x: Tensor, logits: Callable[[Tensor], Tensor], learned: MoeParameters
    ) -> Tensor | None:
        if not self.fuses_experts(spec):
            return None
        return self._kernels.moe(spec, x, logits(x), learned)

    def fuses_experts(self, spec: MoeSpec) -> bool:
        return self._kernels.supports_activation(spec.activation)

    def argmax(self, x: Tensor) -> Tensor:
        return self._torch.argmax(x)
