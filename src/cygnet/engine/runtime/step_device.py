"""What the runner needs of a device besides the model: memory for a step's inputs, copies both ways, a way to wait.

Copies to and from a GPU run on their own, after the call that asked for them. Who reads the host's memory there is the
device, at a time that the host does not know; so

    host memory of an upload     must stay as it is
    host memory of a download    must not be looked at          until a mark set behind it is done
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
ALIGNMENT = 16
"""Integers (128 bytes) at which each input begins: Triton compiles a kernel anew for pointers of another alignment."""
FIRST_SIZE = 4096


class Mark(Protocol):
    """A point in the device's work."""

    def done(self) -> bool:
        """Whether the device has got there. Never waits."""

    def wait(self) -> None:
        """Until the device has got there."""


class StepDevice(Protocol):
    """Where steps run. Work, copies and marks happen in the order in which they were asked for."""

    @property
    def asynchronous(self) -> bool:
        """Whether work and copies go on after the calls that asked for them."""

    def host(self, size: int) -> Tensor:
        """int64 [size] of host memory to upload from, of any content."""

    def upload(self, host: Tensor) -> Tensor:
        """What is in `host`, on the device. `host` must not change until a mark set from now on is done."""

    def download(self, tensor: Tensor) -> Tensor:
        """What is in `tensor`, in host memory; to be read when a mark set from now on is done."""

    def mark(self) -> Mark:
        """A mark behind all that was asked for."""


class _Done:
    """Where everything is done as soon as it is asked for."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainDevice:
    """Any device, without overlap: on a CPU nothing is copied, elsewhere every copy waits."""

    asynchronous = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self._device)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def mark(self) -> Mark:
        return _Done()


class CudaDevice:
    """The current stream of a GPU. Not run on a GPU."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=True)  # pageable memory is copied with the host waiting

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


def step_device(device: torch.device) -> StepDevice:
    """The one for a torch device."""
    return CudaDevice(device) if device.type == "cuda" else PlainDevice(device)


class Staging:
    """A step's integers side by side in host memory, so that one copy brings all of them to the device.

    The memory is used again by the next step. That is safe because steps are launched one at a time: the mark that
    `result` waits for lies behind this step's copy.
    """

    def __init__(self, device: StepDevice) -> None:
        self._device = device
        self._host = device.host(FIRST_SIZE)
        self._parts: list[tuple[int, Sequence[int]]] = []
        self._size = 0

    def lay_out(self, *shapes: Sequence[int]) -> list[Ints]:
        """Room for one array of each shape, to be filled before `upload`."""
        self._parts, self._size = [], 0
        for shape in shapes:
            self._parts.append((self._size, shape))
            self._size += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        if self._size > len(self._host):
            self._host = self._device.host(2 * self._size)
        return [part.numpy() for part in self._views(self._host)]

    def upload(self) -> list[Tensor]:
        """The arrays on the device."""
        return self._views(self._device.upload(self._host[: self._size]))

    def _views(self, memory: Tensor) -> list[Tensor]:
        return [memory[first : first + prod(shape)].view(*shape) for first, shape in self._parts]
