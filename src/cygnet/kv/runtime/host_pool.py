"""Host memory of the second tier: one region per group, cut into objects as the store keeps them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64

from cygnet.base.errors import ConfigError, InvariantError
from cygnet.base.geometry import KVGeometry
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.store import Group, ObjectKey
from cygnet.kv.transfers import CHECKSUM_BYTES, group_geometry, object_bytes


def checksum(key: ObjectKey, body: memoryview) -> bytes:
    """Over an object's key and all bytes of `body` before its checksum."""
    digest = xxh3_64(key)
    digest.update(body[:-CHECKSUM_BYTES])
    return digest.intdigest().to_bytes(CHECKSUM_BYTES, "little")


def is_sealed(key: ObjectKey, body: memoryview) -> bool:
    """Whether `body` is, byte for byte, what `HostPool.seal` made of the object called `key`."""
    return checksum(key, body) == body[-CHECKSUM_BYTES:]


class HostPool:
    """Storage for every host block of both groups, `kv/transfers.py` draws its layout.

        group region   [num_blocks, object_bytes]
        one object     | layer 0: K | V | layer 1: K | V | ... | zeros | checksum |

    Memory comes in huge pages where the system has them, and a block takes none before it is first written. With
    `pinned` all of it is taken at once, and locked so that a GPU reaches it by itself; the copies of `transfers` do
    without, as they go through small pinned slots. With `poison`, storage starts as NaN and `poison_blocks` makes freed
    blocks NaN again, as in the device pool.

    Not thread-safe by itself: whoever holds a block, a copy or a store command, is the only one who writes it.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_full: int,
        num_swa: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        pinned: bool = False,
        poison: bool = False,
    ) -> None:
        """`num_full` and `num_swa` blocks of `block_size` tokens. `dtype` has the geometry's bytes per element."""
        self.geometry = geometry
        self.block_size = block_size
        self.dtype = dtype
        self.num_blocks = {Group.FULL: num_full, Group.SWA: num_swa if geometry.has_swa else 0}
        self.object_bytes = {group: object_bytes(group_geometry(geometry, group), block_size) for group in Group}
        self._memory: dict[Group, memoryview] = {}
        self._elements: dict[Group, Tensor] = {}
        """The same, [num_blocks, elements of an object]."""
        for group in Group:
            shape = group_geometry(geometry, group)
            if shape.num_layers and shape.dtype_bytes != dtype.itemsize:
                raise InvariantError(f"the geometry has {shape.dtype_bytes} bytes per element, {dtype} does not")
            num_bytes = self.num_blocks[group] * self.object_bytes[group]
            memory = pool_memory(num_bytes) if num_bytes else memoryview(bytearray())
            self._memory[group] = memory
            width = self.object_bytes[group] // dtype.itemsize
            self._elements[group] = (
                torch.frombuffer(memory, dtype=dtype).view(-1, width) if num_bytes else torch.empty(0, width)
            )
            if pinned and num_bytes:
                _pin(self._elements[group])
            if poison:
                self._elements[group].fill_(float("nan"))

    @property
    def num_bytes(self) -> int:
        """Bytes of both regions."""
        return sum(map(len, self._memory.values()))

    def object(self, group: Group, block: int) -> memoryview:
        """The whole object of a block, writable."""
        self._check(group, block)
        size = self.object_bytes[group]
        return self._memory[group][block * size : (block + 1) * size]

    def address(self, group: Group, block: int) -> int:
        """Where the object of a block lies."""
        self._check(group, block)
        return int(self._elements[group].data_ptr()) + block * self.object_bytes[group]

    def layer(self, group: Group, index: int) -> tuple[Tensor, Tensor]:
        """Key [num_blocks, block_size, kv_heads, key_dim] and value (value_dim) of one layer of the group: views of the
        objects, contiguous from the second dimension on."""
        shape, objects = group_geometry(self.geometry, group), self._elements[group]
        if not 0 <= index < shape.num_layers:
            raise InvariantError(f"layer {index} of the {group.name} group, which has {shape.num_layers}")
        heads, tokens = shape.num_kv_heads, self.block_size
        start = index * tokens * heads * (shape.key_dim + shape.value_dim)
        middle = start + tokens * heads * shape.key_dim
        end = middle + tokens * heads * shape.value_dim
        return (
            objects[:, start:middle].unflatten(1, (tokens, heads, shape.key_dim)),
            objects[:, middle:end].unflatten(1, (tokens, heads, shape.value_dim)),
        )

    def seal(self, key: ObjectKey, group: Group, block: int) -> None:
        """Make the block's KV the object called `key`: zeros behind it, then the checksum."""
        body = self.object(group, block)
        payload = group_geometry(self.geometry, group).block_bytes(self.block_size)
        body[payload:-CHECKSUM_BYTES] = bytes(len(body) - CHECKSUM_BYTES - payload)
        body[-CHECKSUM_BYTES:] = checksum(key, body)

    def verify(self, key: ObjectKey, group: Group, block: int) -> bool:
        """Whether the block holds the object called `key`, sealed and unchanged since."""
        return is_sealed(key, self.object(group, block))

    def poison_blocks(self, full: Sequence[int], swa: Sequence[int]) -> None:
        """Fill freed blocks with NaN."""
        for group, blocks in ((Group.FULL, full), (Group.SWA, swa)):
            if blocks:
                self._elements[group].index_fill_(0, torch.tensor(blocks), float("nan"))

    def _check(self, group: Group, block: int) -> None:
        if not 0 <= block < self.num_blocks[group]:
            raise InvariantError(f"host block {block} of the {group.name} group, which has {self.num_blocks[group]}")


def _pin(region: Tensor) -> None:
    """Lock memory for a GPU's own reads and writes, until the process ends. Not run on a GPU."""
    error = int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0))
    if error:
        raise ConfigError(
            f"{region.nbytes} bytes of host memory can't be pinned (CUDA error {error}): "
            "make --host-cache smaller, or raise the limit on locked memory (ulimit -l)"
        )
