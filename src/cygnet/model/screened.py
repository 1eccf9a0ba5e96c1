"""Greedy choice that reads half of the LM head, and chooses as the whole head does.

A copy of the head in bytes gives every logit up to a bound that holds for sure (`model/cpu/argmax_kernels.py`); the few
outputs that may be the likeliest within it, some ten of text, are worked out from the head itself.
"""

import torch
from torch import Tensor

from cygnet.model.cpu.kernels import kernel
from cygnet.model.cpu.panel_layout import panels_per_piece
from cygnet.model.cpu.team import num_threads
from cygnet.model.int8 import BytePanels
from cygnet.model.packed import PackedWeight, first_of_largest

_PART = 64
"""Panels looked through at a time."""
_TIES = 1 / 64
"""Two logits that are equal once rounded to bf16 differ by less than this share of their size."""
MOST_ROWS = 16
"""Rows up to which this is faster than all logits."""


class ScreenedHead:
    """The choice of the likeliest outputs of a head, `weight` [out, in] plain or in panels."""

    def __init__(self, rounded: BytePanels, exact: Tensor | PackedWeight) -> None:
        """`exact` is what `rounded` was made of, plain or in panels."""
        self._bytes = rounded
        self._exact = exact
        self._room = torch.empty(0)

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [rows]: the first of the largest logits of rows `x` [rows, in], logits rounded to x's dtype."""
        held, x, threads = self._bytes, x.contiguous(), num_threads()
        rows, (out, size), panels = x.shape[0], held.shape, len(held.panels)
        upper, ends = self._scratch(rows * out), torch.empty(2, rows, panels)
        kernel("screen", x.dtype)(
            threads,
            x.data_ptr(),
            held.panels.data_ptr(),
            held.scale.data_ptr(),
            upper.data_ptr(),
            ends.data_ptr(),
            rows,
            out,
            size,
            held.padded,
            panels_per_piece(panels, threads),
            *held.scratch(rows, threads),
            int(held.size_sum),
        )
        low = ends[0].amax(1)
        thresholds = low - low.abs() * _TIES
        parts, in_panels = -(-panels // _PART), isinstance(self._exact, PackedWeight)
        address = self._exact.panels if isinstance(self._exact, PackedWeight) else self._exact.data_ptr()
        found = torch.empty(rows, parts, 2, dtype=torch.int64)
        cells = torch.empty(threads * 16)
        kernel("settle", x.dtype)(
            threads,
            x.data_ptr(),
            address,
            upper.data_ptr(),
            thresholds.data_ptr(),
            found.data_ptr(),
            rows,
            out,
            size,
            parts,
            _PART,
            int(in_panels),
            cells.data_ptr(),
            ends[1].data_ptr(),
        )
        return first_of_largest(found)

    def _scratch(self, size: int) -> Tensor:
        if self._room.numel() < size:
            self._room = torch.empty(size)
        return self._room
