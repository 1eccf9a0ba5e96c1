"""Building blocks of a decoder: linear map, RMS norm, gated MLP. Inference only; no parameter requires a gradient."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cygnet.base.errors import ModelLoadError
from cygnet.base.registry import Registry
from cygnet.model.description import DenseMlp
from cygnet.model.int8 import Int8Weight
from cygnet.model.packed import PackedWeight, can_pack
from cygnet.model.widened import WidenedWeight

if TYPE_CHECKING:
    from cygnet.model.ops import StepOps

WeightSlots = Iterator[tuple[str, Tensor]]
"""Names of the checkpoint's tensors, each with the piece of a parameter that it fills."""


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Uninitialised weights, to be filled by the loader."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: fp32, or fp64 for an fp64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Linear(nn.Module):
    """y = x W^T + b over several outputs that share an input: `parts` names them and gives their row counts.

    Once loaded, the weight is kept in packed layout only, where that works, or in one byte per element. Its dtype may
    be bf16 where all else is in fp32 (`model/widened.py`).
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.parts = parts
        rows = sum(parts.values())
        self.weight: nn.Parameter | None = parameter(rows, in_features, dtype=weight_dtype or dtype, device=device)
        self.bias = parameter(rows, dtype=dtype, device=device) if bias else None
        self._widened: WidenedWeight | None = None
        self._is_narrow = self.weight.dtype != dtype
        self._packed: PackedWeight | None = None
        self._int8: Int8Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._widened is not None:
            return self._widened.linear(x, self.bias)
        if self._int8 is not None:
            return self._int8.linear(x, self.bias)
        if self._packed is not None:
            return self._packed.linear(x, self.bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def finish_loading(self, *, int8: bool = False, keep_packed: bool = True) -> None:
        """Replace the weight by its packed form, or by bytes (and, with `keep_packed`, the packed form of those)."""
        if int8 and self.weight is not None:
            self._int8 = Int8Weight(self.weight, keep_packed=keep_packed)
            self.weight = None
        if self._is_narrow and self.weight is not None:
            self._widened = WidenedWeight(self.weight)
            self.weight = None
        if self.weight is not None and can_pack(self.weight.dtype, self.weight.device.type):
            self._packed = PackedWeight(self.weight)
            self.weight = None

    def weight_slots(self) -> WeightSlots:
        """`<part>.weight` and `<part>.bias` of every part; before `finish_loading` only."""
        assert self.weight is not None
        start = 0
        for name, rows in self.parts.items():
            yield f"{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + rows]
            start += rows


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 (fp64 for fp64).

    `rows` > 1 keeps that many weights, for tensors whose last two dimensions are [rows, size].
    """

    def __init__(
        self, size: int, *, eps: float, offset: float, dtype: torch.dtype, device: torch.device, rows: int = 1
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.inverse_size = 1.0 / size
        shape = (size,) if rows == 1 else (rows, size)
        self.weight = parameter(*shape, dtype=wide_dtype(dtype), device=device)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        # A norm and a product are several times faster on CPUs than a mean of squares.
        rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(self.inverse_size).add_(self.eps)
        return (wide * rms.rsqrt_()).mul_(self.weight).to(x.dtype)

    def finish_loading(self) -> None:
        """Add the offset that the family's checkpoints leave out."""
        if self.offset:
            self.weight.add_(self.offset)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function called `name` in Hugging Face configs. Raises `ModelLoadError` if unknown."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise ModelLoadError(f"activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}") from None


def gated(x: Tensor, act: Callable[[Tensor], Tensor], *, limit: float | None = None, up_offset: float = 0.0) -> Tensor:
    """act(gate) * (up + up_offset) for `x` [..., 2 * size] = [gate | up]; see `MoeSpec` for `limit`."""
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if up_offset:
        up = up + up_offset
    return act(gate).mul_(up)


MLPS: Registry[type[nn.Module]] = Registry("MLP kind")
"""Modules built as `cls(spec, hidden_size, dtype=, device=, weight_dtype=)` by the spec's `kind`, and called as
`mlp(x, ops)`."""


@MLPS.register(DenseMlp.kind)
class DenseMlpLayer(nn.Module):
    """Gated MLP with gate and up fused into one product."""

    def __init__(
        self,
        spec: DenseMlp,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = spec.intermediate_size
        self.act = spec.activation
        activation(self.act)  # an unknown one is an error now
        linear = partial(Linear, bias=spec.bias, dtype=dtype, device=device, weight_dtype=weight_dtype)
        self.gate_up = linear(hidden_size, {"gate": size, "up": size})
        self.down = linear(size, {"down": hidden_size})

    def forward(self, x: Tensor, ops: "StepOps") -> Tensor:
        return self.down(ops.gated(self.gate_up(x), self.act))

    def weight_slots(self) -> WeightSlots:
        yield from self.gate_up.weight_slots()
        yield from self.down.weight_slots()
