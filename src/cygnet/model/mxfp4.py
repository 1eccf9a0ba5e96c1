"""MXFP4, the 4-bit format of the OCP Microscaling specification: blocks of 32 numbers that share a power of two.

A number is 4 bits, E2M1: sign, two bits of exponent, one of mantissa. A scale is 8 bits, E8M0: the exponent alone.
"""

from functools import lru_cache

import torch
from torch import Tensor

BLOCK_SIZE = 32
BLOCK_BYTES = BLOCK_SIZE // 2

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127
_SCALE_NAN = 255


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """bf16 [..., blocks * 32] for `blocks` [..., blocks, 16] and `scales` [..., blocks], both uint8.

    Byte i of a block holds number 2i in its low half and number 2i + 1 in its high half. bf16 has the scales' range and
    more digits than E2M1, so the result is exact, but for 4 and 6 times the largest scale: those are infinite.
    """
    pairs, powers = _tables()
    numbers = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    factors = powers.index_select(0, scales.flatten().int()).unsqueeze(1)
    numbers = numbers.view(-1, BLOCK_SIZE).mul_(factors)
    return numbers.view(*scales.shape[:-1], scales.shape[-1] * BLOCK_SIZE)


@lru_cache
def _tables() -> tuple[Tensor, Tensor]:
    """By byte: the two numbers of it, as the 32 bits of a pair of bf16; and the scale that it is, bf16."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1).view(torch.int32).squeeze(1)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), byte - _SCALE_BIAS).bfloat16()
    powers[_SCALE_NAN] = float("nan")
    return pairs, powers
