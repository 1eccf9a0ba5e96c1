"""Weights of one byte: int8 with a scale per output.

up to `FEW` rows   a compiled kernel multiplies the bytes with activations rounded to 15 bits of a row's largest; it
                   reads half of what bf16 weights take
more rows          a packed copy of the rounded weights in the model's dtype, if one is kept; else bytes are widened
                   slice by slice
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cygnet.model.cpu.kernels import SUFFIX, kernel, numba_works
from cygnet.model.cpu.panel_layout import PANEL, ROWS, panels_per_piece
from cygnet.model.cpu.team import num_threads
from cygnet.model.packed import PackedWeight, can_pack, scratch

FEW = 32
"""Rows up to which the compiled kernel is faster than a packed product in bf16."""
_SLICE = 1 << 20
"""Weights rounded or widened at a time, in torch."""
_TINY = 1e-20


class BytePanels:
    """The matrix `weight` [out, in], rounded. Symmetric: the largest weight of an output becomes 127 or -127.

    panels    int8 [out / 64, in / 2, 64, 2], both sizes rounded up and padded with zeros
    scale     fp32 [out]
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        out, size = weight.shape
        self.padded = size + size % 2
        shape = (-(-out // PANEL), self.padded // 2, PANEL, 2)
        self.panels = torch.empty(shape, dtype=torch.int8, device=weight.device)
        self.scale = torch.empty(out, dtype=torch.float32, device=weight.device)
        if compiled(weight.dtype):
            self._round(weight.contiguous())
        else:
            self._round_in_torch(weight)

    def scratch(self, rows: int, threads: int) -> tuple[int, int]:
        """Address of scratch memory for the kernels that multiply `rows` rows, and how many bytes each thread has."""
        each = (2 * 4 * ROWS * PANEL + 4 * rows + 2 * rows * self.padded + 63) // 64 * 64
        return scratch(each * threads).data_ptr(), each

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `index` [n] of the matrix, [n, in] in `dtype`."""
        rows = self.panels[index // PANEL, :, index % PANEL].flatten(1)[:, : self.shape[1]]
        return (rows * self.scale[index, None]).to(dtype)

    def wide(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Rows of panels `first` ... `first + count - 1`, [<= count * PANEL, in] in `dtype`."""
        rows = self.panels[first : first + count].transpose(1, 2).flatten(2).flatten(0, 1)
        scale = self.scale[first * PANEL : (first + count) * PANEL]
        return (rows[: len(scale), : self.shape[1]] * scale[:, None]).to(dtype)

    def _round(self, weight: Tensor) -> None:
        kernel("round_panels", weight.dtype)(
            num_threads(),
            weight.data_ptr(),
            self.panels.data_ptr(),
            self.scale.data_ptr(),
            *self.shape,
            self.padded,
            panels_per_piece(len(self.panels), num_threads()),
        )

    def _round_in_torch(self, weight: Tensor) -> None:
        self.panels.zero_()
        count = max(1, _SLICE // (PANEL * self.padded))
        for first in range(0, len(self.panels), count):
            rows = slice(first * PANEL, (first + count) * PANEL)
            wide = weight[rows].float()
            scale = wide.abs().amax(1).clamp_min_(_TINY).div_(127)
            rounded = F.pad(wide.div_(scale[:, None]).round_(), (0, self.padded - wide.shape[1], 0, -len(wide) % PANEL))
            self.scale[rows] = scale
            self.panels[first : first + count] = rounded.view(-1, PANEL, self.padded // 2, 2).transpose(1, 2)


class Int8Weight:
    """`BytePanels` to multiply with. `keep_packed` spends memory (that of the matrix in its own dtype) on speed with
    many rows."""

    def __init__(self, weight: Tensor, *, keep_packed: bool) -> None:
        self._bytes = BytePanels(weight)
        self._packed: PackedWeight | None = None
        if keep_packed and can_pack(weight.dtype, weight.device.type):
            self._packed = PackedWeight(self._bytes.wide(0, len(self._bytes.panels), weight.dtype))

    @property
    def panels(self) -> BytePanels:
        """The rounded matrix."""
        return self._bytes

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `index` [n] of the matrix, [n, in] in `dtype`."""
        return self._bytes.rows(index, dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b for `x` [rows, in], in x's dtype."""
        if x.shape[0] <= FEW and compiled(x.dtype):
            return self._few(x.contiguous(), bias)
        if self._packed is not None:
            return self._packed.linear(x, bias)
        return self._widened(x, bias)

    def _few(self, x: Tensor, bias: Tensor | None) -> Tensor:
        held, rows, threads = self._bytes, x.shape[0], num_threads()
        y = x.new_empty(rows, held.shape[0])
        wide_bias = None if bias is None else bias.float()
        kernel("multiply_i8", x.dtype)(
            threads,
            x.data_ptr(),
            held.panels.data_ptr(),
            held.scale.data_ptr(),
            0 if wide_bias is None else wide_bias.data_ptr(),
            y.data_ptr(),
            rows,
            *held.shape,
            held.padded,
            panels_per_piece(len(held.panels), threads),
            *held.scratch(rows, threads),
        )
        return y

    def _widened(self, x: Tensor, bias: Tensor | None) -> Tensor:
        held = self._bytes
        y = x.new_empty(x.shape[0], held.shape[0])
        count = max(1, _SLICE // (PANEL * held.padded))
        for first in range(0, len(held.panels), count):
            rows = slice(first * PANEL, min((first + count) * PANEL, held.shape[0]))
            y[:, rows] = F.linear(x, held.wide(first, count, x.dtype), None if bias is None else bias[rows])
        return y


def compiled(dtype: torch.dtype) -> bool:
    """Whether there are kernels for activations of this type."""
    return dtype in SUFFIX and numba_works()
