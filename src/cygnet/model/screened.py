"""Greedy choice that reads half of the LM head, and chooses as the whole head does.

A copy of the head in bytes gives every logit up to a bound that holds for sure (`model/cpu/screen_kernels.py`); the few
outputs that may be the likeliest within it, some fifteen of text, are worked out from the head itself.
"""

import torch
from torch import Tensor

from cygnet.model.cpu.kernels import kernel
from cygnet.model.cpu.panel_layout import PANEL, ROWS, panels_per_piece
from cygnet.model.cpu.team import num_threads
from cygnet.model.packed import PackedWeight, first_of_largest, scratch
from cygnet.model.widened import WidenedWeight

_PART = 64
"""Panels looked through at a time."""
_TIES = 1 / 64
"""Two logits that are equal once rounded to bf16 differ by less than this share of their size."""
MOST_ROWS = 32
"""Rows up to which this is faster than all logits."""
_WIDEST = 1 << 16
"""Inputs whose products of two bytes add up in 32 bits."""


class ScreenedHead:
    """The choice of the likeliest outputs of a head.

    panels   uint8 [out / 64, in / 4, 64, 4]: bytes of the weights, 128 added
    figures  fp32 [3, out]: of every output the step of its bytes, the norm of what they are off, their norm

    `out` is rounded up to whole panels: the last output is repeated.
    """

    def __init__(self, weight: Tensor, exact: PackedWeight | WidenedWeight | None = None) -> None:
        """`weight` [out, in] is kept, too, unless `exact` holds the same in panels."""
        (out, size), threads = weight.shape, num_threads()
        weight = weight.contiguous()
        self._shape, self._words = weight.shape, -(-size // 4)
        self._exact = weight if exact is None else exact  # keeps the memory
        self._in_panels = exact is not None
        if isinstance(exact, PackedWeight):
            self._address = exact.panels
        else:
            self._address = (weight if exact is None else exact.panels).data_ptr()
        self._settle = "settle_widened" if isinstance(exact, WidenedWeight) else "settle"
        self._panels = torch.empty(-(-out // PANEL), self._words, PANEL, 4, dtype=torch.uint8)
        self._figures = torch.empty(3, len(self._panels) * PANEL)
        self._room = torch.empty(0)
        kernel("round_head", weight.dtype)(
            threads,
            weight.data_ptr(),
            self._panels.data_ptr(),
            self._figures.data_ptr(),
            out,
            size,
            self._words,
            panels_per_piece(len(self._panels), threads),
        )

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a head is narrow enough."""
        return weight.shape[1] < _WIDEST

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [rows]: the first of the largest logits of rows `x` [rows, in], logits rounded to x's dtype."""
        x, threads = x.contiguous(), num_threads()
        rows, (out, size), panels = x.shape[0], self._shape, len(self._panels)
        upper, ends = self.screen(x)
        low = ends[0].amax(1)
        thresholds = low - low.abs() * _TIES
        parts = -(-panels // _PART)
        found = torch.empty(rows, parts, 2, dtype=torch.int64)
        cells = torch.empty(threads * 16)
        kernel(self._settle, x.dtype)(
            threads,
            x.data_ptr(),
            self._address,
            upper.data_ptr(),
            thresholds.data_ptr(),
            found.data_ptr(),
            rows,
            out,
            size,
            parts,
            _PART,
            int(self._in_panels),
            cells.data_ptr(),
            ends[1].data_ptr(),
        )
        return first_of_largest(found)

    def screen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows `x` [rows, in], contiguous: upper ends of all logits fp32 [rows, out / 64, 64], valid until the next
        call; and fp32 [2, rows, out / 64], the largest lower and the largest upper end of every panel."""
        threads, rows, panels = num_threads(), x.shape[0], len(self._panels)
        upper, ends = self._scratch(rows * panels * PANEL), torch.empty(2, rows, panels)
        each = 8 * (ROWS * PANEL + -(-rows // ROWS) * (1 + self._words)) + 8 * rows * (3 + self._words)
        each = -(-each // 64) * 64
        kernel("screen", x.dtype)(
            threads,
            x.data_ptr(),
            self._panels.data_ptr(),
            self._figures.data_ptr(),
            upper.data_ptr(),
            ends.data_ptr(),
            rows,
            panels,
            x.shape[1],
            self._words,
            panels_per_piece(panels, threads),
            scratch(each * threads).data_ptr(),
            each,
        )
        return upper[: rows * panels * PANEL].view(rows, panels, PANEL), ends

    def _scratch(self, size: int) -> Tensor:
        if self._room.numel() < size:
            self._room = torch.empty(size)
        return self._room
