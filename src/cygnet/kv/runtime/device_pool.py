"""KV tensors of both pools on the device."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.kv.sizing import PoolSizes
from cygnet.model.batch import LayerKV

_ALIGNMENT = 64
"""Bytes, as torch aligns its own memory."""


class DevicePool:
    """Storage for every block of both groups: per layer one key and one value tensor.

    With `poison`, storage starts as NaN and `poison_blocks` makes freed blocks NaN again, so that any read of KV that
    is not there shows in the output.

    With `scratch`, each group has one more block than `sizes` says, its last. Nobody is ever given it: it is where rows
    that only pad a batch write.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        sizes: PoolSizes,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        poison: bool = False,
        scratch: bool = False,
    ) -> None:
        self.block_size = sizes.block_size
        self.scratch_full = sizes.full_blocks if scratch else None
        self.scratch_swa = sizes.swa_blocks if scratch else None

        def layers(group: GroupGeometry, num_blocks: int) -> list[LayerKV]:
            def storage(dim: int) -> torch.Tensor:
                shape = (num_blocks + scratch, sizes.block_size, group.num_kv_heads, dim)
                tensor = _zeros(shape, dtype, torch.device(device))
                return tensor.fill_(float("nan")) if poison else tensor

            return [LayerKV(storage(group.key_dim), storage(group.value_dim)) for _ in range(group.num_layers)]

        self.full = layers(geometry.full, sizes.full_blocks)
        self.swa = layers(geometry.swa, sizes.swa_blocks)

    def poison_blocks(self, full: Sequence[int], swa: Sequence[int]) -> None:
        """Fill freed blocks with NaN."""
        for layers, blocks in ((self.full, full), (self.swa, swa)):
            if blocks:
                index = torch.tensor(blocks)
                for layer in layers:
                    layer.key.index_fill_(0, index.to(layer.key.device), float("nan"))
                    layer.value.index_fill_(0, index.to(layer.value.device), float("nan"))

    @property
    def num_bytes(self) -> int:
        """Bytes of all KV tensors, scratch blocks among them."""
        return sum(t.nbytes for layer in self.full + self.swa for t in (layer.key, layer.value))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that on a CPU take no memory before they are used, so that a large pool costs nothing until it fills.

    torch writes its zeros; NumPy asks the system for memory that reads as zero.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(*shape)
