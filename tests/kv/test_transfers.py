"""A step's copies: bit for bit, in order, failing loudly; on a CPU, and as on a GPU with a stream that is late."""

from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
import torch

from cygnet.base.errors import InvariantError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockId
from cygnet.kv.runtime import cuda_mover, movers, pieces, transfers
from cygnet.kv.runtime.cuda_mover import CudaCopyStream, CudaMover
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.memory import pool_memory
from cygnet.kv.runtime.movers import CpuMover, Mover
from cygnet.kv.runtime.transfers import TransferEngine
from cygnet.kv.sizing import PoolSizes
from cygnet.kv.store import Group
from cygnet.kv.transfers import Copies, Pair, StepTransfers
from cygnet.model.batch import GroupName
from support.late_stream import LateCopyStream
from support.slow_mover import SlowMover

GEOMETRY = KVGeometry(GroupGeometry(2, 3, 24, 16, 2), GroupGeometry(3, 5, 8, 16, 2, 7))
LAYERS: list[tuple[GroupName, int]] = [("swa", 0), ("full", 0), ("swa", 1), ("swa", 2), ("full", 1)]
SIZES = PoolSizes(4, 20, 16, 64)
HOST_FULL, HOST_SWA = 30, 25
MakeMover = Callable[[DevicePool, HostPool], Mover]


def pairs(*couples: tuple[int, int]) -> tuple[Pair, ...]:
    return tuple((BlockId(a), BlockId(b)) for a, b in couples)


class Subject:
    """Two poisoned pools and an engine between them."""

    def __init__(self, make: MakeMover | None = None, **options: float) -> None:
        self.device = DevicePool(GEOMETRY, SIZES, dtype=torch.bfloat16, device="cpu", poison=True)
        self.host = HostPool(GEOMETRY, HOST_FULL, HOST_SWA, 4, torch.bfloat16, poison=True)
        self.mover = make(self.device, self.host) if make else CpuMover(self.device, self.host)
        self.engine = TransferEngine(self.device, self.host, LAYERS, mover=self.mover, **options)

    def tensors(self, group: Group, *, host: bool) -> list[torch.Tensor]:
        """Key and value of every layer [blocks, ...]."""
        layers = movers.device_layers(self.device, group)
        if host:
            return [tensor for index in range(len(layers)) for tensor in self.host.layer(group, index)]
        return [tensor for layer in layers for tensor in (layer.key, layer.value)]

    def randomize(self, seed: int) -> None:
        """Random bits everywhere, NaN payloads among them: copies must not look at them as numbers."""
        generator = torch.Generator().manual_seed(seed)
        for host in (False, True):
            for group in Group:
                for tensor in self.tensors(group, host=host):
                    bits = torch.randint(-(2**15), 2**15, tensor.shape, dtype=torch.int16, generator=generator)
                    tensor.view(torch.int16).copy_(bits)

    def content(self) -> dict[tuple[Group, bool], list[torch.Tensor]]:
        """A copy of everything, as integers."""
        return {
            (group, host): [tensor.view(torch.int16).clone() for tensor in self.tensors(group, host=host)]
            for group in Group
            for host in (False, True)
        }

    def run(self, step: StepTransfers) -> None:
        gate = self.engine.begin(step)
        gate.wait_all()
        gate.join()
        assert self.engine.audit() == []


def late(device: DevicePool, host: HostPool) -> CudaMover:
    return CudaMover(device, host, LateCopyStream())


MOVERS: dict[str, MakeMover] = {"cpu": CpuMover, "late stream": late}


@pytest.fixture(params=MOVERS)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = Subject(MOVERS[request.param])
    yield subject
    subject.engine.close()
    if isinstance(subject.mover, CudaMover):
        stream = subject.mover._stream
        assert isinstance(stream, LateCopyStream)
        assert stream.wrong == []


@pytest.mark.parametrize("slice_bytes", [1, 5000, 1 << 20])
def test_random_steps_copy_what_they_should_and_nothing_else(
    subject: Subject, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain assignments, over scattered blocks of both groups in all directions at once."""
    monkeypatch.setattr(transfers, "SLICE_BYTES", slice_bytes)
    rnd = Random(slice_bytes)
    for seed in range(8):
        subject.randomize(seed)
        want = subject.content()
        steps: dict[str, dict[str, tuple[Pair, ...]]] = {"evicted": {}, "loads": {}, "saves": {}}
        for group, device, host in ((Group.FULL, 20, HOST_FULL), (Group.SWA, 16, HOST_SWA)):
            here, there = rnd.sample(range(device), 12), rnd.sample(range(host), 12)
            for part, name in enumerate(steps):
                couples = list(zip(here, there, strict=True))[4 * part : 4 * part + rnd.randrange(5)]
                loads = name == "loads"
                for a, b in couples:
                    for left, right in zip(want[group, False], want[group, True], strict=True):
                        (left if loads else right)[a if loads else b] = (right if loads else left)[b if loads else a]
                steps[name][group.name.lower()] = pairs(*((b, a) if loads else (a, b) for a, b in couples))
        subject.run(StepTransfers(**{name: Copies(**groups) for name, groups in steps.items()}))
        got = subject.content()
        for place, tensors in want.items():
            assert all(torch.equal(a, b) for a, b in zip(got[place], tensors, strict=True)), place


def test_a_round_trip_through_other_blocks(subject: Subject) -> None:
    subject.randomize(1)
    before = subject.content()
    subject.run(StepTransfers(saves=Copies(pairs((3, 20), (4, 21)), pairs((7, 2)))))
    subject.run(StepTransfers(loads=Copies(pairs((20, 11), (21, 10)), pairs((2, 0)))))
    after = subject.content()
    for group, couples in ((Group.FULL, ((3, 11), (4, 10))), (Group.SWA, ((7, 0),))):
        for was, now in zip(before[group, False], after[group, False], strict=True):
            assert all(torch.equal(was[a], now[b]) for a, b in couples)


def test_nothing_to_do(subject: Subject) -> None:
    gate = subject.engine.begin(StepTransfers())
    assert (gate.is_loading, gate.done()) == (False, True)
    gate.wait("full", 0)
    gate.wait_all()
    gate.join()
    assert subject.engine._thread is None


def test_evicted_blocks_are_read_before_they_are_poisoned_and_loaded(subject: Subject) -> None:
    """A device block changes hands twice within a step: evicted, freed and poisoned, loaded into. A host block that was
    freed takes what is evicted; and what is evicted can be loaded elsewhere at once."""
    subject.randomize(2)
    before = subject.content()

    def poison() -> None:
        subject.device.poison_blocks([5, 6], [])

    step = StepTransfers(
        evicted=Copies(pairs((5, 9))), loads=Copies(pairs((9, 7), (12, 5))), freed_host_full=(BlockId(9), BlockId(1))
    )
    gate = subject.engine.begin(step, poison)
    gate.join()
    after = subject.content()
    for was, now in zip(before[Group.FULL, False], after[Group.FULL, False], strict=True):
        assert torch.equal(now[7], was[5])
    for was, now in zip(before[Group.FULL, True], after[Group.FULL, False], strict=True):
        assert torch.equal(now[5], was[12])
    assert all(tensor[6].isnan().all() for tensor in subject.tensors(Group.FULL, host=False))
    assert all(tensor[1].isnan().all() for tensor in subject.tensors(Group.FULL, host=True))
    assert not any(tensor[9].isnan().all() for tensor in subject.tensors(Group.FULL, host=True))


def test_order() -> None:
    """Evicted, `between`, loads in the order of the model's layers, saves."""
    told: list[str] = []
    subject = Subject(lambda device, host: SlowMover(device, host, free=True, told=told))
    some = Copies(pairs((1, 1)), pairs((2, 2)))
    step = StepTransfers(evicted=some, loads=some, saves=some, freed_host_swa=(BlockId(2),))
    poisoned = subject.host.poison_blocks
    subject.host.poison_blocks = lambda full, swa: (told.append(f"poison {full} {swa}"), poisoned(full, swa))[1]  # type: ignore[method-assign]
    gate = subject.engine.begin(step, lambda: told.append("between"))
    gate.join()
    assert told == [
        "poison () (2,)",
        *("save FULL", "save SWA", "between"),
        *("load SWA 0", "load FULL 0", "load SWA 1", "load SWA 2", "load FULL 1"),
        *("save FULL", "save SWA"),
    ]


def test_a_layer_waits_for_its_own_loads_only() -> None:
    subject = Subject(SlowMover)
    mover = subject.mover
    assert isinstance(mover, SlowMover)
    subject.randomize(3)
    gate = subject.engine.begin(StepTransfers(loads=Copies(pairs((1, 2)), pairs((3, 4)))))
    for position, (name, index) in enumerate(LAYERS):
        assert gate.is_loading
        assert len(mover.told) <= position, "nothing is loaded before it is let"
        mover.let()
        gate.wait(name, index)
        group, (source, target) = (Group.FULL, (1, 2)) if name == "full" else (Group.SWA, (3, 4))
        for part in (0, 1):
            here = subject.tensors(group, host=False)[2 * index + part].view(torch.int16)
            there = subject.tensors(group, host=True)[2 * index + part].view(torch.int16)
            assert torch.equal(here[target], there[source])
    gate.join()
    assert not gate.is_loading
    subject.engine.close()


def test_layers_without_loads_do_not_wait() -> None:
    """Only the full group's layers have some here."""
    subject = Subject(SlowMover)
    assert isinstance(subject.mover, SlowMover)
    gate = subject.engine.begin(StepTransfers(loads=Copies(full=pairs((1, 2))), saves=Copies(swa=pairs((1, 2)))))
    for index in range(3):
        gate.wait("swa", index)
    assert not gate.done()
    subject.mover.let(2)
    gate.wait_all()
    gate.join()
    assert subject.mover.told == ["load FULL 0", "load FULL 1", "save SWA"]
    subject.engine.close()


@pytest.mark.parametrize("what", ["load SWA 1", "save FULL"])
def test_a_copy_that_fails_is_raised(what: str) -> None:
    """Where it is waited for, and at the end; what was copied before is there."""
    subject = Subject(lambda device, host: SlowMover(device, host, free=True))
    assert isinstance(subject.mover, SlowMover)
    subject.mover.fails.add(what)
    some = Copies(pairs((1, 2)), pairs((3, 4)))
    gate = subject.engine.begin(StepTransfers(loads=some, saves=some))
    gate.wait("full", 0)
    if what.startswith("load"):
        for wait in (lambda: gate.wait("swa", 1), lambda: gate.wait("full", 1), gate.wait_all):
            with pytest.raises(OSError, match=f"{what} failed"):
                wait()
    with pytest.raises(OSError, match=f"{what} failed"):
        gate.join()
    assert gate.done()


def test_an_evicted_block_that_fails_is_raised_at_once() -> None:
    subject = Subject(SlowMover)
    assert isinstance(subject.mover, SlowMover)
    subject.mover.fails.add("save SWA")
    with pytest.raises(OSError):
        subject.engine.begin(StepTransfers(evicted=Copies(swa=pairs((1, 2)))), lambda: pytest.fail("too early"))


def test_one_step_at_a_time(subject: Subject) -> None:
    step = StepTransfers(saves=Copies(pairs((1, 2))))
    gate = subject.engine.begin(step)
    assert subject.engine.audit() == ["a step's copies have not been joined"]
    with pytest.raises(InvariantError, match="joined"):
        subject.engine.begin(step)
    gate.join()
    subject.run(step)


@pytest.mark.parametrize(
    "step",
    [
        StepTransfers(loads=Copies(pairs((HOST_FULL, 0)))),
        StepTransfers(loads=Copies(pairs((0, 20)))),
        StepTransfers(saves=Copies(swa=pairs((16, 0)))),
        StepTransfers(saves=Copies(swa=pairs((0, HOST_SWA)))),
        StepTransfers(evicted=Copies(pairs((-1, 0)))),
    ],
    ids=lambda step: repr([copies for copies in (step.evicted, step.loads, step.saves) if copies]),
)
def test_blocks_that_are_not_there_are_refused(subject: Subject, step: StepTransfers) -> None:
    before = subject.content()
    with pytest.raises(InvariantError, match="block"):
        subject.engine.begin(step)
    after = subject.content()
    assert all(torch.equal(a, b) for place in before for a, b in zip(before[place], after[place], strict=True))
    assert subject.engine.audit() == []


def test_pools_of_other_shapes_are_refused() -> None:
    device = DevicePool(GEOMETRY, SIZES, dtype=torch.bfloat16, device="cpu")
    full, swa = GEOMETRY.full, GEOMETRY.swa
    for geometry, size in (
        (GEOMETRY, 8),
        (KVGeometry(GroupGeometry(2, 3, 16, 24, 2), swa), 4),
        (KVGeometry(GroupGeometry(1, 3, 24, 16, 2), swa), 4),
        (KVGeometry(full, GroupGeometry(3, 4, 8, 16, 2, 7)), 4),
    ):
        with pytest.raises(InvariantError):
            CpuMover(device, HostPool(geometry, 1, 1, size, torch.bfloat16))


def test_a_link_imitated_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that sleeping moves."""
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(transfers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(transfers.time, "sleep", sleep)
    subject = Subject(bytes_per_s=1000.0)
    some = Copies(pairs((1, 2), (2, 3)), pairs((3, 4)))
    subject.run(StepTransfers(evicted=some, loads=some, saves=some))
    num_bytes = 3 * (2 * GEOMETRY.full.block_bytes(4) + GEOMETRY.swa.block_bytes(4))
    assert sum(slept) == pytest.approx(num_bytes / 1000)
    assert subject.engine.bytes_loaded + subject.engine.bytes_saved == num_bytes
    subject.engine.close()


def test_all_before_computing_when_asked_for() -> None:
    """Without layer-wise loads `begin` comes back when the last load is done; with them, when none is."""
    step = StepTransfers(loads=Copies(pairs((1, 2)), pairs((3, 4))))
    subject = Subject(SlowMover)
    mover = subject.mover
    assert isinstance(mover, SlowMover)
    for layer_wise in (False, True):
        mover.told.clear()
        subject.engine.imitate(layer_wise=layer_wise)
        mover.let(0 if layer_wise else len(LAYERS))
        gate = subject.engine.begin(step)
        assert len(mover.told) == (0 if layer_wise else len(LAYERS))
        mover.let(len(LAYERS) if layer_wise else 0)
        gate.wait_all()
        gate.join()
    subject.engine.close()


def test_little_is_copied_without_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject()
    subject.run(StepTransfers(saves=Copies(pairs((1, 2)))))
    assert subject.engine._thread is None
    monkeypatch.setattr(transfers, "INLINE_BYTES", 0)
    subject.run(StepTransfers(saves=Copies(pairs((1, 2)))))
    assert subject.engine._thread is not None
    subject.engine.close()
    subject.engine.close()


def test_copies_that_get_nowhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "STALL_S", 0.02)
    subject = Subject(SlowMover)
    assert isinstance(subject.mover, SlowMover)
    gate = subject.engine.begin(StepTransfers(loads=Copies(pairs((1, 2)))))
    with pytest.raises(InvariantError, match="nowhere"):
        gate.wait("full", 0)
    subject.mover.let(2)


def test_loads_on_a_stream_follow_what_the_device_was_asked_for() -> None:
    """Poisoning above all."""
    stream = LateCopyStream()
    subject = Subject(lambda device, host: CudaMover(device, host, stream))
    some = Copies(pairs((1, 2)))
    gate = subject.engine.begin(StepTransfers(evicted=some, loads=some), lambda: stream.told.append("between"))
    gate.join()
    assert stream.told == ["follow", "between", "follow"]
    subject.engine.close()


def test_a_late_stream_notices_changed_memory() -> None:
    stream = LateCopyStream()
    pinned, target = stream.pinned(4), torch.zeros(3, 4, dtype=torch.uint8)
    stream.upload(pinned.view(1, 4), target, np.array([2]))
    mark = stream.mark()
    pinned[1] = 0
    assert not target.any()
    mark.wait()
    assert stream.wrong
    assert target[2].tolist() == pinned.tolist()


@pytest.mark.parametrize("copier", ["compiled", "one by one"])
@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("scale", [1, 400])
def test_pieces(copier: str, shift: int, scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little and much, whole cache lines and parts of them, at any address; nothing beside them."""
    if copier == "compiled":
        pytest.importorskip("numba")
        assert pieces._copier() is not pieces._copy_each
    else:
        monkeypatch.setattr(pieces, "_copier", lambda: pieces._copy_each)
    memory = np.random.default_rng(0).integers(0, 256, (2, 8192 * scale), np.uint8)
    source, target = memory[0], pool_memory(8192 * scale)
    starts = np.array([[64, 128], [1024, 3072]]) * scale + shift
    sizes = np.array([[7, 0], [2048 * scale, 4096 * scale + 1]])
    into = np.frombuffer(target, np.uint8)
    pieces.copy_pieces(into.ctypes.data + starts, source.ctypes.data + starts, sizes)
    want = np.zeros(8192 * scale, np.uint8)
    for start, size in zip(starts.ravel(), sizes.ravel(), strict=True):
        want[start : start + size] = source[start : start + size]
    assert np.array_equal(into, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_on_a_gpu() -> None:
    place = torch.device("cuda")
    device = DevicePool(GEOMETRY, SIZES, dtype=torch.bfloat16, device=place)
    host = HostPool(GEOMETRY, HOST_FULL, HOST_SWA, 4, torch.bfloat16, pinned=True)
    engine = TransferEngine(device, host, LAYERS, mover=cuda_mover.CudaMover(device, host, CudaCopyStream(place)))
    for layer in device.full:
        layer.key.normal_()
    want = device.full[1].key[3].cpu()
    engine.begin(StepTransfers(saves=Copies(pairs((3, 20))))).join()
    gate = engine.begin(StepTransfers(loads=Copies(pairs((20, 5)))))
    gate.wait("full", 1)
    assert torch.equal(device.full[1].key[5].cpu(), want)
    gate.join()
    engine.close()
