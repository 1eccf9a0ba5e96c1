"""How KV gets from blocks of one tier to blocks of the other. Here: by address, where both are a CPU's memory."""

from typing import Protocol

import numpy as np
from torch import Tensor

from cygnet.base.errors import InvariantError
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.pieces import Ints, copy_pieces, prepare_copies
from cygnet.kv.store import Group
from cygnet.kv.transfers import group_geometry
from cygnet.model.batch import LayerKV

SLICE_BYTES = 8 << 20
"""A mover is given no more at a time, or one block."""


class Ready(Protocol):
    """A point in a mover's work."""

    def wait(self) -> None:
        """Work that the calling thread asks the device for from now on comes after it."""


class Mover(Protocol):
    """Copies between one device pool and one host pool, in the order of the calls. Blocks are arrays of ids, one to
    one; they are in range, and weigh `SLICE_BYTES` at most, or are one.

    `follow` is called by the thread that runs the model; everything else by one thread at a time.
    """

    @property
    def is_immediate(self) -> bool:
        """Whether all calls return with their copies done."""

    def follow(self) -> None:
        """Copies from now on come after what the device has been asked for so far."""

    def load(self, group: Group, layer: int, host: Ints, device: Ints) -> Ready:
        """Begin to copy one layer of host blocks to device blocks."""

    def save(self, group: Group, device: Ints, host: Ints) -> None:
        """Begin to copy all layers of device blocks to host blocks."""

    def finish(self) -> None:
        """Until all copies are done."""


def device_layers(pool: DevicePool, group: Group) -> list[LayerKV]:
    """The device pool's storage of a group."""
    return pool.full if group is Group.FULL else pool.swa


def num_device_blocks(pool: DevicePool, group: Group) -> int:
    """Blocks of a group on the device, 0 where it has no layers."""
    return next((layer.key.shape[0] for layer in device_layers(pool, group)), 0)


def check_pools(pool: DevicePool, host: HostPool) -> None:
    """Raises `InvariantError` where blocks of the two are not alike."""
    if pool.block_size != host.block_size:
        raise InvariantError(f"device blocks of {pool.block_size} tokens, host blocks of {host.block_size}")
    for group in Group:
        layers = device_layers(pool, group)
        if len(layers) != group_geometry(host.geometry, group).num_layers:
            raise InvariantError(f"the {group.name} group has other layers on the device than on the host")
        for index, layer in enumerate(layers):
            for device, hosted in zip((layer.key, layer.value), host.layer(group, index), strict=True):
                if device.shape[1:] != hosted.shape[1:] or device.dtype != hosted.dtype:
                    raise InvariantError(f"{group.name} layer {index}: {device.shape} here, {hosted.shape} on the host")


class Done:
    """Where everything is done as soon as it is asked for."""

    def wait(self) -> None:
        pass


DONE = Done()


class CpuMover:
    """Both pools in this machine's memory. It holds no Python lock while it copies, and uses no OpenMP threads."""

    is_immediate = True

    def __init__(self, pool: DevicePool, host: HostPool) -> None:
        check_pools(pool, host)
        self._pools = pool, host  # their memory is read and written by address
        self._layouts = {group: Layout(pool, host, group) for group in Group}
        prepare_copies()

    def follow(self) -> None:
        pass

    def load(self, group: Group, layer: int, host: Ints, device: Ints) -> Ready:
        layout, layers = self._layouts[group], slice(layer, layer + 1)
        copy_pieces(layout.device(device, layers), layout.host(host, layers), layout.sizes(len(host), layers))
        return DONE

    def save(self, group: Group, device: Ints, host: Ints) -> None:
        layout, layers = self._layouts[group], slice(None)
        copy_pieces(layout.host(host, layers), layout.device(device, layers), layout.sizes(len(host), layers))

    def finish(self) -> None:
        pass


class Layout:
    """Where the pieces of a group's blocks are, as arrays [blocks, layers, key and value] of addresses and sizes."""

    def __init__(self, pool: DevicePool, host: HostPool, group: Group) -> None:
        here = [(layer.key, layer.value) for layer in device_layers(pool, group)]
        there = [host.layer(group, index) for index in range(len(here))]
        self._sizes = _table([[tensor[:1].nbytes for tensor in pair] for pair in here])
        self._here, self._here_strides = _places(here)
        self._there, self._there_strides = _places(there)

    def device(self, blocks: Ints, layers: slice) -> Ints:
        """In device blocks."""
        return self._here[layers] + blocks[:, None, None] * self._here_strides[layers]

    def host(self, blocks: Ints, layers: slice) -> Ints:
        """In host blocks."""
        return self._there[layers] + blocks[:, None, None] * self._there_strides[layers]

    def sizes(self, count: int, layers: slice) -> Ints:
        """Bytes of the pieces of `count` blocks."""
        sizes = self._sizes[layers]
        return np.broadcast_to(sizes, (count, *sizes.shape))

    def areas(self, count: int, layers: slice) -> Ints:
        """[layers, key and value] offsets, when the pieces of `count` blocks are put together tensor after tensor."""
        sizes = self._sizes[layers]
        before = np.cumsum(sizes) - sizes.ravel()
        return count * before.reshape(sizes.shape)

    def packed(self, count: int, layers: slice) -> Ints:
        """Offsets of the pieces of `count` blocks then."""
        return self.areas(count, layers) + np.arange(count)[:, None, None] * self._sizes[layers]


def _table(rows: list[list[int]]) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _places(layers: list[tuple[Tensor, Tensor]]) -> tuple[Ints, Ints]:
    """Addresses of block 0, and bytes from one block to the next."""
    starts = [[tensor.data_ptr() for tensor in pair] for pair in layers]
    strides = [[tensor.stride(0) * tensor.itemsize for tensor in pair] for pair in layers]
    return _table(starts), _table(strides)
