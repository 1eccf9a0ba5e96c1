"""A copy stream on the CPU that does nothing before it must: it shows who touches memory too early."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from cygnet.kv.runtime.pieces import Ints


class LateCopyMark:
    """A mark in a `LateCopyStream`."""

    def __init__(self, stream: "LateCopyStream", place: int) -> None:
        self._stream = stream
        self._place = place

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self._stream.catch_up(self._place)


class LateCopyStream:
    """Does its work up to a mark when the mark is waited for. Memory to upload that has changed by then, and memory to
    download to that was written to, is listed in `wrong`. `told` lists what is done, in order."""

    def __init__(self, told: list[str] | None = None) -> None:
        self.wrong: list[str] = []
        self.told = [] if told is None else told
        self._work: list[Callable[[], None]] = []
        self._done = 0
        self._lock = threading.Lock()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    def follow(self) -> None:
        self.told.append("follow")

    def upload(self, pinned: Tensor, target: Tensor, blocks: Ints) -> None:
        sent, index = pinned.clone(), torch.from_numpy(blocks.copy())

        def work() -> None:
            if not torch.equal(pinned.view(torch.uint8), sent.view(torch.uint8)):
                self.wrong.append("memory changed before it was copied")
            target.index_copy_(0, index, pinned)

        self._work.append(work)

    def download(self, source: Tensor, blocks: Ints, pinned: Tensor) -> None:
        before, index = pinned.clone(), torch.from_numpy(blocks.copy())

        def work() -> None:
            if not torch.equal(pinned.view(torch.uint8), before.view(torch.uint8)):
                self.wrong.append("memory was used again before it was copied to")
            pinned.copy_(source.index_select(0, index))

        self._work.append(work)

    def mark(self) -> LateCopyMark:
        return LateCopyMark(self, len(self._work))

    def catch_up(self, place: int) -> None:
        """Do all that was asked for before a mark."""
        with self._lock:
            while self._done < place:
                self._work[self._done]()
                self._done += 1
