"""Copies between a GPU's blocks and host blocks, on a stream of their own beside the model's.

    load    host blocks ── gathered by the CPU ──► pinned slot ── one copy ──► GPU ── spread over ──► device blocks
    save    device blocks ── gathered ──► GPU ── one copy ──► pinned slot ── spread over by the CPU ──► host blocks

There are two slots, so that the CPU fills or empties one while the other is copied.

**Not run on a GPU.** The logic is tested on the CPU with a stream that is late with everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.movers import SLICE_BYTES, Layout, Ready, check_pools, device_layers
from cygnet.kv.runtime.pieces import Ints, copy_pieces, prepare_copies
from cygnet.kv.store import Group
from cygnet.kv.transfers import group_geometry


class CopyMark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """The calling thread's current stream goes on after it. The caller does not wait."""

    def synchronize(self) -> None:
        """Until the stream has got there."""


class CopyStream(Protocol):
    """Copies on the side, in the order in which they were asked for. Host memory is read and written by the device, at
    any time until a mark set behind the copy is reached."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory that the device reaches by itself."""

    def follow(self) -> None:
        """What is asked for from now on comes after what the caller's current stream was asked for so far."""

    def upload(self, pinned: Tensor, target: Tensor, blocks: Ints) -> None:
        """target[blocks] = pinned, of the same dtype and shape."""

    def download(self, source: Tensor, blocks: Ints, pinned: Tensor) -> None:
        """pinned = source[blocks]"""

    def mark(self) -> CopyMark:
        """A mark behind all that was asked for."""


class CudaCopyStream:
    """The real one. Not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def upload(self, pinned: Tensor, target: Tensor, blocks: Ints) -> None:
        with torch.cuda.stream(self._stream):
            target.index_copy_(0, self._index(blocks), pinned.to(self._device, non_blocking=True))

    def download(self, source: Tensor, blocks: Ints, pinned: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            pinned.copy_(source.index_select(0, self._index(blocks)), non_blocking=True)

    def mark(self) -> CopyMark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaCopyMark(event, self._device)

    def _index(self, blocks: Ints) -> Tensor:
        return torch.from_numpy(blocks).pin_memory().to(self._device, non_blocking=True)


class _CudaCopyMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


@dataclass
class _Slot:
    memory: Tensor
    mark: CopyMark | None = None
    """Behind the last copy from or to it."""
    deliver: Callable[[], None] | None = None
    """What is left to do with its content then."""

    def settle(self) -> None:
        """Until it is free."""
        mark, deliver = self.mark, self.deliver
        self.mark = self.deliver = None
        if mark is not None:
            mark.synchronize()
        if deliver is not None:
            deliver()


class CudaMover:
    """A `Mover`. Invariant: a slot is filled and emptied only when the last copy from or to it is done."""

    is_immediate = False

    def __init__(self, pool: DevicePool, host: HostPool, stream: CopyStream) -> None:
        check_pools(pool, host)
        self._pool = pool
        self._host = host  # its memory is read and written by address
        self._stream = stream
        self._layouts = {group: Layout(pool, host, group) for group in Group}
        block_bytes = (group_geometry(host.geometry, group).block_bytes(host.block_size) for group in Group)
        size = max(SLICE_BYTES, *block_bytes)
        self._slots = [_Slot(stream.pinned(size)) for _ in range(2)]
        prepare_copies()

    def follow(self) -> None:
        self._stream.follow()

    def load(self, group: Group, layer: int, host: Ints, device: Ints) -> Ready:
        layout, layers, slot = self._layouts[group], slice(layer, layer + 1), self._next_slot()
        slots = slot.memory.data_ptr() + layout.packed(len(host), layers)
        copy_pieces(slots, layout.host(host, layers), layout.sizes(len(host), layers))
        for tensor, pinned in self._areas(group, layers, len(host), slot):
            self._stream.upload(pinned, tensor, device)
        slot.mark = self._stream.mark()
        return slot.mark

    def save(self, group: Group, device: Ints, host: Ints) -> None:
        layout, layers, slot = self._layouts[group], slice(None), self._next_slot()
        for tensor, pinned in self._areas(group, layers, len(host), slot):
            self._stream.download(tensor, device, pinned)
        slot.mark = self._stream.mark()

        def deliver() -> None:
            slots = slot.memory.data_ptr() + layout.packed(len(host), layers)
            copy_pieces(layout.host(host, layers), slots, layout.sizes(len(host), layers))

        slot.deliver = deliver

    def finish(self) -> None:
        for slot in self._slots:  # in the order of their use
            slot.settle()

    def _next_slot(self) -> _Slot:
        """The one that was used longest ago, once it is free."""
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.settle()
        return slot

    def _areas(self, group: Group, layers: slice, count: int, slot: _Slot) -> list[tuple[Tensor, Tensor]]:
        """Each tensor of the layers, with its part of the slot as [count, ...]."""
        offsets = self._layouts[group].areas(count, layers).ravel()
        tensors = [tensor for layer in device_layers(self._pool, group)[layers] for tensor in (layer.key, layer.value)]
        areas = []
        for tensor, offset in zip(tensors, offsets.tolist(), strict=True):
            shape = (count, *tensor.shape[1:])
            part = slot.memory[offset : offset + count * tensor[:1].nbytes]
            areas.append((tensor, part.view(tensor.dtype).view(shape)))
        return areas
