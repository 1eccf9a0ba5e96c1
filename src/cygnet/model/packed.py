"""Weight matrices reordered once into oneDNN's blocked layout, which CPUs read up to twice as fast for few tokens.

A plain matrix is reordered inside every product. The operators used here are not public in PyTorch, so they are tried
on a small matrix first; where they are missing, fail or differ, weights simply stay plain.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_HINT = 512
"""Tokens per product that the layout is chosen for. It serves one token as well."""

_MIN_ROWS = 4
"""bf16 products of fewer tokens take another path in oneDNN, which reads packed weights about a sixth slower. Rows are
independent, so what is in those added does not matter."""


def pack(weight: Tensor) -> Tensor:
    """An opaque tensor in blocked layout with the values of `weight` [out, in], for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for `x` [tokens, in]."""
    rows = x.shape[0]
    if 0 < rows < _MIN_ROWS and x.dtype == torch.bfloat16:
        padded = x.new_empty(_MIN_ROWS, x.shape[1])
        padded[:rows] = x
        return torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")[:rows]
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@lru_cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Whether packing works here: tried, and compared with the plain product."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float32) or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(48, 32, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    try:
        packed = pack(weight)
        for num_tokens in (1, 5):
            x = torch.randn(num_tokens, 32, generator=generator).to(dtype)
            got, want = packed_linear(x, packed, bias), F.linear(x, weight, bias)
            if not torch.allclose(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2):
                return False
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True
