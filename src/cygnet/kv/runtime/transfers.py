"""Carries out a step's copies between device and host blocks, beside the forward pass.

    begin     poison freed host blocks | evicted | `between`: poison freed device blocks | hand over the rest
    thread                                                                      loads, layer by layer | saves
    model                                                                       wait(layer 0), layer 0, wait(1) ...
    join                                                                                    until all of it is done

Nothing may be freed, written or evicted under a copy; so a step is not over before its copies are.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from cygnet.base.errors import InvariantError
from cygnet.kv.runtime.cuda_mover import CudaCopyStream, CudaMover
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.movers import SLICE_BYTES, CpuMover, Mover, Ready, num_device_blocks
from cygnet.kv.runtime.pieces import Ints
from cygnet.kv.store import Group
from cygnet.kv.transfers import Copies, StepTransfers, group_geometry
from cygnet.model.batch import GroupName, LayerGate

INLINE_BYTES = 256 << 10
"""So little is copied at once where it stands: waking a thread takes as long."""
STALL_S = 60.0
"""A copy that has got nowhere for so long never will."""

_GROUPS: Mapping[GroupName, Group] = {"full": Group.FULL, "swa": Group.SWA}


class Gate(LayerGate, Protocol):
    """The copies of one step."""

    @property
    def is_loading(self) -> bool:
        """Whether the forward pass may have something to wait for."""

    def done(self) -> bool:
        """Whether `join` would not wait."""

    def join(self) -> None:
        """Until all copies are done, saves too. To be called once for every step; raises what a copy failed with."""


class Transfers(Protocol):
    """What the model runner needs of a copy engine: `TransferEngine`, or a stand-in."""

    def begin(self, step: StepTransfers, between: Callable[[], None] = lambda: None) -> Gate:
        """Start a step's copies. `between` is called when evicted blocks have been read, and nothing is loaded yet:
        the time to poison device blocks. Raises what an evicted block's copy failed with, and `InvariantError` when the
        last step's copies have not been joined."""

    def audit(self) -> list[str]:
        """All discrepancies; between steps only."""


class _StepGate:
    """The copies of one step, as they go on. Made by the thread that waits, driven by the one that copies."""

    def __init__(self, layers: Sequence[tuple[GroupName, int]], joined: Callable[[], None]) -> None:
        """`layers` in the order in which they are loaded."""
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._joined = joined
        self._condition = threading.Condition()
        self._loaded: list[Ready] = []
        self._progress = 0
        self._over = False
        self._error: BaseException | None = None

    @property
    def is_loading(self) -> bool:
        return bool(self._places) and not self._over

    def wait(self, group: GroupName, index: int) -> None:
        place = self._places.get((group, index))
        if place is not None:
            self._wait_for(place)

    def wait_all(self) -> None:
        if self._places:
            self._wait_for(len(self._places) - 1)  # loads are done in order

    def done(self) -> bool:
        return self._over

    def join(self) -> None:
        self._sleep_until(lambda: self._over)
        self._joined()
        if self._error is not None:
            raise self._error

    def loaded(self, ready: Ready) -> None:
        """The next layer's loads are done, or will be at `ready`."""
        with self._condition:
            self._loaded.append(ready)
            self._condition.notify_all()

    def advanced(self) -> None:
        """Something has been copied."""
        self._progress += 1

    def end(self, error: BaseException | None = None) -> None:
        """Nothing is copied any more."""
        with self._condition:
            self._error, self._over = error, True
            self._condition.notify_all()

    def _wait_for(self, place: int) -> None:
        if len(self._loaded) <= place:
            self._sleep_until(lambda: len(self._loaded) > place or self._over)
            if len(self._loaded) <= place:
                raise self._error or InvariantError("a step's copies ended before its loads")
        self._loaded[place].wait()

    def _sleep_until(self, condition: Callable[[], bool]) -> None:
        with self._condition:
            seen = self._progress
            while not self._condition.wait_for(condition, STALL_S):
                if self._progress == seen:
                    raise InvariantError(f"copies between device and host have got nowhere for {STALL_S:.0f} s")
                seen = self._progress


class TransferEngine:
    """Copies of one device pool and one host pool, on one thread of its own, which is started when first needed.

    Invariants (`audit`, between steps): no step's copies are under way, and the last step's have been joined.
    """

    def __init__(
        self,
        pool: DevicePool,
        host: HostPool,
        layers: Sequence[tuple[GroupName, int]],
        *,
        bytes_per_s: float | None = None,
        layer_wise: bool = True,
        mover: Mover | None = None,
    ) -> None:
        """`layers`: group, and index in it, of each of the model's layers in their order. `bytes_per_s` and
        `layer_wise`: see `imitate`. `mover` stands in for the pools' own."""
        self._host = host
        self._mover = mover or mover_for(pool, host)
        self._layers = [(name, _GROUPS[name], index) for name, index in layers]
        self._limits = {group: (host.num_blocks[group], num_device_blocks(pool, group)) for group in Group}
        shapes = {group: group_geometry(host.geometry, group) for group in Group}
        self._block_bytes = {group: shape.block_bytes(host.block_size) for group, shape in shapes.items()}
        self._layer_bytes = {
            group: self._block_bytes[group] // max(1, shape.num_layers) for group, shape in shapes.items()
        }
        self.imitate(bytes_per_s=bytes_per_s, layer_wise=layer_wise)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # one at most: begin sees to it
        self._thread: threading.Thread | None = None
        self._current: _StepGate | None = None
        self.bytes_loaded = 0
        self.bytes_saved = 0
        """Evicted blocks among them."""

    def begin(self, step: StepTransfers, between: Callable[[], None] = lambda: None) -> Gate:
        """See `Transfers`."""
        if self._current is not None:
            raise InvariantError("copies were begun before the last step's were joined")
        evicted, saves = (self._blocks(copies, "save") for copies in (step.evicted, step.saves))
        loads = self._blocks(step.loads, "load")
        self._host.poison_blocks(step.freed_host_full, step.freed_host_swa)
        if evicted:
            self._mover.follow()
            self._save(evicted, lambda: None)
            self._mover.finish()
        between()
        order = [(name, index) for name, group, index in self._layers if group in loads]
        gate = self._current = _StepGate(order, self._joined)
        if not loads and not saves:
            gate.end()
            return gate
        self._mover.follow()
        num_bytes = self._bytes(loads) + self._bytes(saves)
        work = partial(self._run, gate, loads, saves)
        if self._mover.is_immediate and self._pace.is_free and num_bytes <= INLINE_BYTES:
            work()
        else:
            self._start_thread()
            self._jobs.put(work)
        if not self._layer_wise:
            gate.wait_all()
        return gate

    def imitate(self, *, bytes_per_s: float | None = None, layer_wise: bool = True) -> None:
        """For benchmarks, between steps: copy no faster than a link of `bytes_per_s` would; without `layer_wise`, begin
        no layer before all loads are done."""
        self._pace = _Pace(bytes_per_s)
        self._layer_wise = layer_wise

    def close(self) -> None:
        """End the thread, after the copies under way. May be called twice."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(STALL_S)
            self._thread = None

    def audit(self) -> list[str]:
        """See `Transfers`."""
        if self._current is not None:
            return ["a step's copies have not been joined"]
        return [] if self._jobs.empty() else ["copies are waiting that belong to no step"]

    def _joined(self) -> None:
        self._current = None

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="kv-transfers", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()

    def _run(self, gate: _StepGate, loads: "_Blocks", saves: "_Blocks") -> None:
        """A step's loads and saves. What they fail with is the gate's to raise."""
        try:
            for _, group, index in self._layers:
                if group in loads:
                    gate.loaded(self._load(group, index, *loads[group], gate.advanced))
            self._save(saves, gate.advanced)
            self._mover.finish()
        except BaseException as error:
            gate.end(error)
        else:
            gate.end()

    def _load(self, group: Group, layer: int, host: Ints, device: Ints, advanced: Callable[[], None]) -> Ready:
        size = self._layer_bytes[group]
        for part in _slices(len(host), size):
            ready = self._mover.load(group, layer, host[part], device[part])
            self.bytes_loaded += size * len(host[part])
            self._pace.wait(size * len(host[part]))
            advanced()
        return ready

    def _save(self, blocks: "_Blocks", advanced: Callable[[], None]) -> None:
        for group, (device, host) in blocks.items():
            size = self._block_bytes[group]
            for part in _slices(len(host), size):
                self._mover.save(group, device[part], host[part])
                self.bytes_saved += size * len(host[part])
                self._pace.wait(size * len(host[part]))
                advanced()

    def _blocks(self, copies: Copies, what: str) -> "_Blocks":
        """The pairs of each group that has any, as arrays in the order of the host blocks: memory is read or written
        faster from one end to the other. Raises `InvariantError` for blocks that are not there, as they are turned into
        addresses."""
        found = {}
        for group, pairs in ((Group.FULL, copies.full), (Group.SWA, copies.swa)):
            if pairs:
                table = np.array(pairs, dtype=np.int64)
                host = 0 if what == "load" else 1
                for column, limit in zip((host, 1 - host), self._limits[group], strict=True):
                    blocks = table[:, column]
                    if blocks.min() < 0 or blocks.max() >= limit:
                        raise InvariantError(
                            f"{what} of {group.name} blocks {blocks.min()} to {blocks.max()} in a pool of {limit}"
                        )
                source, target = table[table[:, host].argsort()].T.copy()
                found[group] = source, target
        return found

    def _bytes(self, blocks: "_Blocks") -> int:
        return sum(self._block_bytes[group] * len(source) for group, (source, _) in blocks.items())


_Blocks = dict[Group, tuple[Ints, Ints]]
"""(from, to) per group that has any."""


def mover_for(pool: DevicePool, host: HostPool) -> Mover:
    """What copies between these pools."""
    device = pool.full[0].key.device
    return CudaMover(pool, host, CudaCopyStream(device)) if device.type == "cuda" else CpuMover(pool, host)


class _Pace:
    """Imitates a link of so many bytes per second."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    @property
    def is_free(self) -> bool:
        return self._bytes_per_s is None

    def wait(self, num_bytes: int) -> None:
        """As long as the link takes for what has just been copied."""
        if self._bytes_per_s is not None:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - now))


def _slices(count: int, size: int) -> list[slice]:
    """`count` blocks of `size` bytes, `SLICE_BYTES` at a time."""
    step = max(1, SLICE_BYTES // size)
    return [slice(first, first + step) for first in range(0, count, step)]
