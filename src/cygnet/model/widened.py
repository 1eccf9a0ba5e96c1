"""Weights in bf16 for computing in fp32, on CPUs that can't multiply bf16: half the memory, and half the reading.

A kernel widens each weight on its way into the registers, which is exact, and multiplies and adds in fp32. For many
tokens it is about as fast as products with weights in fp32, for one twice as fast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cygnet.model.cpu.kernels import kernel
from cygnet.model.cpu.panel_layout import PANEL, ROW_BLOCK, WIDENED_SCRATCH, panels_per_piece
from cygnet.model.cpu.team import num_threads
from cygnet.model.packed import scratch


class WidenedWeight:
    """The matrix `weight` bf16 [out, in], to multiply with fp32.

    panels    bf16 [out / 64, in / 2, 64, 2], both sizes rounded up and padded with zeros
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        out, size = weight.shape
        self.padded = size + size % 2
        self.panels = torch.empty(-(-out // PANEL), self.padded // 2, PANEL, 2, dtype=torch.bfloat16)
        for panel, rows in zip(self.panels, weight.detach().split(PANEL), strict=True):
            even = F.pad(rows, (0, self.padded - size, 0, PANEL - len(rows)))
            panel.copy_(even.view(PANEL, -1, 2).transpose(0, 1))

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `index` [n] of the matrix, [n, in] in `dtype`."""
        rows = self.panels[index // PANEL, :, index % PANEL].flatten(1)[:, : self.shape[1]]
        return rows.to(dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b for `x` fp32 [rows, in], in fp32."""
        (out, size), rows, threads = self.shape, x.shape[0], num_threads()
        x = x.contiguous() if size == self.padded else F.pad(x, (0, self.padded - size))
        y = x.new_empty(rows, out)
        wide_bias = None if bias is None else bias.float()
        kernel("multiply_widened", torch.float32)(
            threads,
            x.data_ptr(),
            self.panels.data_ptr(),
            0 if wide_bias is None else wide_bias.data_ptr(),
            y.data_ptr(),
            rows,
            out,
            self.padded,
            1 if rows >= ROW_BLOCK else panels_per_piece(len(self.panels), threads),
            scratch(threads * WIDENED_SCRATCH).data_ptr(),
        )
        return y
