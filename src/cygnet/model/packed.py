"""Weight matrices reordered once into oneDNN's blocked layout, which CPUs read up to twice as fast for few tokens.

A plain matrix is reordered inside every product. The operators used here are not public in PyTorch, so they are tried
on a small matrix first; where they are missing, fail or differ, weights simply stay plain.

In bf16 with AVX-512 that layout is known: panels of 64 outputs (`model/cpu/vector.py`). Where a matrix is found to have
it, a compiled kernel of ours reads the same memory for few rows, and is faster.
"""

import ctypes
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cygnet.model.cpu.kernels import kernel, numba_works
from cygnet.model.cpu.panel_layout import PANEL, ROWS, panels_per_piece
from cygnet.model.cpu.team import num_threads

_ROWS_HINT = 512
"""Tokens per product that the layout is chosen for. It serves one token as well."""
_MIN_ROWS = 4
"""bf16 products of fewer tokens take another path in oneDNN, which reads packed weights about a sixth slower. Rows are
independent, so what is in those added does not matter."""
_FEW = 32
"""Rows up to which our kernel is faster than oneDNN's."""


class PackedWeight:
    """The matrix `weight` [out, in] in blocked layout, in its dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.panels = _panels_of(self._packed, weight)
        """Address of the panels, or 0 where the layout is another."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b for `x` [rows, in], in the weight's dtype."""
        rows = x.shape[0]
        if self.panels and 0 < rows <= _FEW:
            return self._few(x.contiguous(), bias)
        if 0 < rows < _MIN_ROWS and x.dtype == torch.bfloat16:
            padded = x.new_empty(_MIN_ROWS, x.shape[1])
            padded[:rows] = x
            return torch.ops.mkldnn._linear_pointwise(padded, self._packed, bias, "none", [], "")[:rows]
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def argmax(self, x: Tensor) -> Tensor | None:
        """int64 [rows]: the first of the largest outputs of rows `x`, in the weight's dtype.

        `None` if the layout or the number of rows is another than the kernel's.
        """
        rows = x.shape[0]
        if not self.panels or not 0 < rows <= _FEW:
            return None
        x, (out, size), threads = x.contiguous(), self.shape, num_threads()
        per_piece = panels_per_piece(out // PANEL, threads)
        pieces = -(-(out // PANEL) // per_piece)
        found = torch.empty(rows, pieces, 2, dtype=torch.int64)
        kernel("best_of_panels", torch.bfloat16)(
            threads,
            x.data_ptr(),
            self.panels,
            found.data_ptr(),
            rows,
            out,
            size,
            per_piece,
            scratch(threads * (ROWS + 1) * PANEL * 4).data_ptr(),
        )
        return first_of_largest(found)

    def _few(self, x: Tensor, bias: Tensor | None) -> Tensor:
        (rows, size), out, threads = x.shape, self.shape[0], num_threads()
        y = x.new_empty(rows, out)
        wide_bias = None if bias is None else bias.float()
        kernel("multiply_packed", torch.bfloat16)(
            threads,
            x.data_ptr(),
            self.panels,
            0 if wide_bias is None else wide_bias.data_ptr(),
            y.data_ptr(),
            rows,
            out,
            size,
            panels_per_piece(out // PANEL, threads),
            scratch(threads * ROWS * PANEL * 4).data_ptr(),
        )
        return y


@lru_cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Whether packing works here: tried, and compared with the plain product."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float32) or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(48, 32, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    try:
        packed = PackedWeight(weight)
        for num_tokens in (1, 5):
            x = torch.randn(num_tokens, 32, generator=generator).to(dtype)
            got, want = packed.linear(x, bias), F.linear(x, weight, bias)
            if not torch.allclose(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2):
                return False
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


def first_of_largest(found: Tensor) -> Tensor:
    """int64 [rows] out of (order, place) of parts in their order, [rows, parts, 2]."""
    values, places = found.unbind(-1)
    return places.gather(1, values.argmax(dim=1, keepdim=True)).squeeze(1)


def _panels_of(packed: Tensor, weight: Tensor) -> int:
    """Where the panels of `packed` begin, if its memory holds `weight` in panels and a kernel can read them; else 0."""
    out, size = weight.shape
    if weight.dtype != torch.bfloat16 or out % PANEL or size % 2 or not numba_works():
        return 0
    try:
        if torch.ops.mkldnn._nbytes(packed) != weight.nbytes:
            return 0
        address: int = torch.ops.mkldnn.data_ptr(packed)
    except (RuntimeError, AttributeError, TypeError):
        return 0
    panel_bytes = PANEL * size * weight.itemsize
    for panel in {0, out // PANEL // 2, out // PANEL - 1}:
        raw = ctypes.string_at(address + panel * panel_bytes, panel_bytes)
        found = torch.frombuffer(bytearray(raw), dtype=weight.dtype).view(size // 2, PANEL, 2)
        want = weight[panel * PANEL : (panel + 1) * PANEL].view(PANEL, size // 2, 2).transpose(0, 1)
        if not torch.equal(found.view(torch.int16), want.contiguous().view(torch.int16)):
            return 0
    return address


_SCRATCH = [torch.empty(0, dtype=torch.uint8)]


def scratch(size: int) -> Tensor:
    """`size` bytes at least, for one kernel's call; kept between calls. What was given out stays valid: recorded steps
    (`cpu.programs`) have its address."""
    if _SCRATCH[-1].numel() < size:
        _SCRATCH.append(torch.empty(2 * size, dtype=torch.uint8))
    return _SCRATCH[-1]
