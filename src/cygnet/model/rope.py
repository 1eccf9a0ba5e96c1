"""Rotary position embedding: frequencies, their scaling rules, and the rotation."""

import math

import torch
from torch import Tensor

from cygnet.base.registry import Registry
from cygnet.model.description import RopeScaling, RopeSpec

Cos = Tensor
Sin = Tensor

_NARROWEST_BLEND = 0.001
"""Pairs over which YaRN blends where both ends fall on the same one."""


class RopeScalings(Registry):
    """Rules `(inverse frequencies [rotary_dim / 2], RopeScaling, theta) -> inverse frequencies`, by kind."""


ROPE_SCALINGS = RopeScalings("rope scaling")


@ROPE_SCALINGS.register("linear")
def scale_linear(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Positions are squeezed by the factor."""
    return frequencies / scaling.factor


@ROPE_SCALINGS.register("llama3")
def scale_llama3(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    turns = scaling.original_max_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


@ROPE_SCALINGS.register("yarn")
def scale_yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Frequencies that turn often within the original length are kept, slow ones stretched by the factor.

    pair   0 ....... first ........ last ....... rotary_dim / 2
           kept    |  blend, linear in  |  stretched
                   |  the pair's index  |
    """
    rotary_dim = 2 * len(frequencies)

    def pair_turning(turns: float) -> float:
        """Index of the pair, as a real number, that makes so many turns within the original length."""
        return rotary_dim * math.log(scaling.original_max_len / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound counts dimensions where pairs are meant. Models were trained so.
    first, last = max(first, 0), min(last, rotary_dim - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    stretched_share = ((pairs - first) / ((last - first) or _NARROWEST_BLEND)).clamp(0.0, 1.0)
    return stretched_share * frequencies / scaling.factor + (1 - stretched_share) * frequencies


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """[rotary_dim / 2] fp32: radians per position. Computed in fp32, as in the models' training."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.scaling is None:
        return frequencies
    return ROPE_SCALINGS.get(spec.scaling.kind)(frequencies, spec.scaling, spec.theta)


def cos_sin(frequencies: Tensor, positions: Tensor, dtype: torch.dtype, *, amplitude: float = 1.0) -> tuple[Cos, Sin]:
    """Cosines and sines [num_tokens, 1, rotary_dim / 2] in `dtype`, times `amplitude`, for the tokens' positions."""
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(angle_dtype)[:, None, None] * frequencies.to(angle_dtype)
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1.0:
        cos, sin = cos.mul_(amplitude), sin.mul_(amplitude)
    return cos.to(dtype), sin.to(dtype)


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
