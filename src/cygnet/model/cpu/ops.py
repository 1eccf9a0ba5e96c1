"""Step kernels compiled by numba, for bf16 and fp32 on CPUs; what they don't cover goes to torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from cygnet.model.cpu.glue_kernels import GELU_TANH, SILU
from cygnet.model.cpu.kernels import SUFFIX, kernel
from cygnet.model.cpu.team import num_threads
from cygnet.model.description import AttentionSpec, MoeSpec
from cygnet.model.kernels import MoeParameters
from cygnet.model.layers import RmsNorm
from cygnet.model.ops import STEP_OPS, TorchOps, value_heads
from cygnet.model.packed import first_of_largest
from cygnet.model.rope import Cos, Sin

ALONE = 16384
"""Elements up to which one thread is faster than waking the others."""
PIECE = 4096
"""Elements of a piece of work, about."""
_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}


@STEP_OPS.register("numba")
class NumbaOps:
    """Each method is one call of a kernel. One step at a time."""

    is_compiled = True

    def __init__(self) -> None:
        self._torch = TorchOps()

    def rope_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in SUFFIX else dtype

    def join(
        self, residual: Tensor, branch: Tensor | None, post_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[Tensor, Tensor]:
        if residual.dtype not in SUFFIX:
            return self._torch.join(residual, branch, post_norm, norm)
        rows, size = residual.shape
        residual = residual.contiguous()
        normed = torch.empty_like(residual)
        branch = None if branch is None else branch.contiguous()
        kernel("join", residual.dtype)(
            _threads(rows * size),
            residual.data_ptr(),
            0 if branch is None else branch.data_ptr(),
            normed.data_ptr(),
            0 if post_norm is None else post_norm.weight.data_ptr(),
            norm.weight.data_ptr(),
            rows,
            size,
            _rows_per_piece(size),
            0.0 if post_norm is None else post_norm.eps,
            norm.eps,
        )
        return residual, normed

    def heads(
        self, spec: AttentionSpec, qkv: Tensor, norm: RmsNorm | None, rope: tuple[Cos, Sin]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if qkv.dtype not in SUFFIX:
            return self._torch.heads(spec, qkv, norm, rope)
        qkv = qkv.contiguous()
        rows, size = qkv.shape
        cos, sin = rope
        query = qkv.new_empty(rows, spec.num_heads, spec.key_dim)
        key = qkv.new_empty(rows, spec.num_kv_heads, spec.key_dim)
        kernel("heads", qkv.dtype)(
            _threads(rows * size),
            qkv.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            0 if norm is None else norm.weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.key_dim,
            cos.shape[-1],
            0.0 if norm is None else norm.eps,
        )
        return query, key, value_heads(spec, qkv)

    def gated(self, x: Tensor, activation_name: str) -> Tensor:
        if x.dtype not in SUFFIX or activation_name not in _ACTIVATIONS:
            return self._torch.gated(x, activation_name)
        x = x.contiguous()
        rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, size)
        kernel("gated", x.dtype)(
            _threads(rows * size),
            x.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            _rows_per_piece(size),
            _ACTIVATIONS[activation_name],
        )
        return out

    def experts(
        self, spec: MoeSpec, x: Tensor, logits: Callable[[Tensor], Tensor], learned: MoeParameters
    ) -> Tensor | None:
        return None

    def fuses_experts(self, spec: MoeSpec) -> bool:
        return False

    def argmax(self, x: Tensor) -> Tensor:
        if x.dtype not in SUFFIX:
            return self._torch.argmax(x)
        x = x.contiguous()
        rows, size = x.shape
        parts = -(-size // PIECE)
        found = torch.empty(rows, parts, 2, dtype=torch.int64)
        kernel("best", x.dtype)(_threads(rows * size), x.data_ptr(), found.data_ptr(), rows, size, parts, PIECE)
        return first_of_largest(found)


def _threads(elements: int) -> int:
    return 1 if elements <= ALONE else num_threads()


def _rows_per_piece(size: int) -> int:
    return max(1, PIECE // size)
