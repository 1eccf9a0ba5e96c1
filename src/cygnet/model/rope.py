"""Rotary position embedding: frequencies, their scaling rules, and the rotation."""

import math

import torch
from torch import Tensor

from cygnet.base.registry import Registry
from cygnet.model.description import RopeScaling, RopeSpec

Cos = Tensor
Sin = Tensor


class RopeScalings(Registry):
    """Rules `(inverse frequencies [rotary_dim / 2], RopeScaling) -> inverse frequencies`, by kind."""


ROPE_SCALINGS = RopeScalings("rope scaling")


@ROPE_SCALINGS.register("linear")
def scale_linear(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Positions are squeezed by the factor."""
    return frequencies / scaling.factor


@ROPE_SCALINGS.register("llama3")
def scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = scaling.original_max_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[rotary_dim / 2] fp32: radians per position. Computed in fp32, as in the models' training."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.scaling is None:
        return frequencies
    return ROPE_SCALINGS.get(spec.scaling.kind)(frequencies, spec.scaling)


def cos_sin(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Cos, Sin]:
    """Cosines and sines [num_tokens, 1, rotary_dim / 2] in `dtype` for the tokens' positions."""
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(angle_dtype)[:, None, None] * frequencies.to(angle_dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Cos, sin: Sin) -> Tensor:
    """Rotate `heads` [num_tokens, num_heads, head_dim] in a new tensor.

    Dimension i < rotary_dim / 2 is paired with i + rotary_dim / 2; dimensions from rotary_dim on pass unchanged.
    """
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < heads.shape[-1]:
        rotated[..., 2 * half :] = heads[..., 2 * half :]
    return rotated
