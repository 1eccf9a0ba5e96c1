"""Weights of one byte: int8 with a scale per output. Activations are never rounded below the model's dtype.

few rows     a compiled kernel widens the bytes as it reads them: half the memory traffic of bf16
more rows    a packed copy of the rounded weights in the model's dtype, if one is kept; else bytes are widened slice
             by slice
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cygnet.model.cpu.kernels import SUFFIX, Kernel, numba_works
from cygnet.model.cpu.team import num_threads
from cygnet.model.packed import can_pack, pack, packed_linear

FEW = 3
"""Rows up to which the compiled kernel is faster than a packed product in bf16."""
_SLICE = 1 << 20
"""Weights rounded or widened at a time."""
_PIECE = 64
_TINY = 1e-20


class Int8Weight:
    """A matrix [out, in] in bytes, made for one like `matrix`; `rounded` fills it, or whoever knows the bytes.

    `weight` is int8 [out, in], `scale` fp32 [out].
    """

    def __init__(self, matrix: Tensor) -> None:
        self.weight = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        self.scale = matrix.new_empty(matrix.shape[0], dtype=torch.float32)
        self._dtype = matrix.dtype
        self._packed: Tensor | None = None

    @classmethod
    def rounded(cls, matrix: Tensor) -> "Int8Weight":
        """`matrix` rounded symmetrically: the largest weight of an output becomes 127 or -127."""
        made = cls(matrix)
        step = max(1, _SLICE // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            rows = slice(start, start + step)
            wide = matrix[rows].float()
            made.scale[rows] = wide.abs().amax(1).div_(127).clamp_min_(_TINY)
            made.weight[rows] = wide.div(made.scale[rows, None]).round_().to(torch.int8)
        return made

    def keep_packed(self) -> None:
        """Spend memory (that of the matrix in its own dtype) on speed with many rows."""
        if can_pack(self._dtype, self.weight.device.type):
            self._packed = pack(self._wide(slice(None), self._dtype))

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `index` [n] of the matrix, [n, in] in `dtype`."""
        return (self.weight[index] * self.scale[index, None]).to(dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b for `x` [rows, in], in x's dtype."""
        x = x.contiguous()
        if x.shape[0] <= FEW and x.dtype in SUFFIX and numba_works():
            return self._few(x, bias)
        if self._packed is not None:
            return packed_linear(x, self._packed, bias)
        return self._widened(x, bias)

    def _few(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, (out, size), threads = x.shape[0], self.weight.shape, num_threads()
        y = x.new_empty(rows, out)
        wide_bias = None if bias is None else bias.float()
        _kernel("multiply_i8", x.dtype)(
            threads,
            x.data_ptr(),
            self.weight.data_ptr(),
            self.scale.data_ptr(),
            0 if wide_bias is None else wide_bias.data_ptr(),
            y.data_ptr(),
            rows,
            out,
            size,
            _PIECE,
            _scratch(threads * rows * size).data_ptr(),
        )
        return y

    def _widened(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out, size = self.weight.shape
        y = x.new_empty(x.shape[0], out)
        step = max(1, _SLICE // size)
        for start in range(0, out, step):
            rows = slice(start, min(start + step, out))
            y[:, rows] = F.linear(x, self._wide(rows, x.dtype), None if bias is None else bias[rows])
        return y

    def _wide(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some of the rounded matrix in `dtype`."""
        out = torch.empty_like(self.weight[rows], dtype=dtype)
        step = max(1, _SLICE // out.shape[1])
        for start in range(0, len(out), step):
            part = slice(start, start + step)
            out[part] = self.weight[rows][part] * self.scale[rows][part, None]
        return out


@lru_cache
def _kernel(name: str, dtype: torch.dtype) -> Kernel:
    return Kernel(name, dtype)


_SCRATCH = [torch.empty(0)]


def _scratch(size: int) -> Tensor:
    """fp32 memory for one call, kept between calls."""
    if _SCRATCH[0].numel() < size:
        _SCRATCH[0] = torch.empty(2 * size)
    return _SCRATCH[0]
