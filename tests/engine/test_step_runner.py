"""Runners and their fakes keep one contract; and the real one touches no memory that a device still needs."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from contracts.step_runner import CHECKS, PROMPTS, MakeSubject, Subject
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.engine.core import EngineCore
from cygnet.engine.graph_buckets import Buckets
from cygnet.engine.plan import StepRunner
from cygnet.engine.runtime.cuda_graphs import DecodeGraphs, GroupLayout
from cygnet.engine.runtime.model_runner import ModelRunner
from cygnet.engine.runtime.step_device import ALIGNMENT, CudaDevice, PlainDevice, Staging, StepDevice
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.policy import KVPolicy
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.description import GroupName
from support.fake_runner import FakeRunner, LateRunner
from support.graph_device import FakeGraphDevice, StaticTorchBackend
from support.late_device import LateDevice
from support.tiny_model import tiny_model

SIZES = PoolSizes(4, 60, 30, 120)
FAKE = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(3, 1, 4, 4, 2, window=6))
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def subject_of(geometry: KVGeometry, runner: StepRunner) -> Subject:
    kv = KVManager(geometry, SIZES, KVPolicy(track_freed=True))
    return Subject(EngineCore(kv, SchedulerPolicy(8, 16), fingerprint="test", vocab_size=50), runner)


def model_subject(device: StepDevice) -> Subject:
    model = tiny_model(TorchBackend())
    geometry = model.description.kv_geometry(4)
    pool = DevicePool(geometry, SIZES, dtype=torch.float32, device="cpu", poison=True)
    return subject_of(geometry, ModelRunner(model, pool, window=geometry.window, eos_token_ids=(), device=device))


def graphed_subject() -> Subject:
    """Decodes of up to two requests are replayed, padded; later than the device can be."""
    model = tiny_model(backend := StaticTorchBackend())
    geometry = model.description.kv_geometry(4)
    pool = DevicePool(geometry, SIZES, dtype=torch.float32, device="cpu", poison=True, scratch=True)
    assert pool.scratch_full is not None
    assert pool.scratch_swa is not None
    groups: dict[GroupName, GroupLayout] = {
        "full": GroupLayout(pool.full, 30, pool.scratch_full),
        "swa": GroupLayout(pool.swa, 5, pool.scratch_swa),
    }
    graphs = DecodeGraphs(model, backend, FakeGraphDevice(), Buckets((2,)), block_size=4, groups=groups)
    runner = ModelRunner(model, pool, window=geometry.window, eos_token_ids=(), forward=graphs, device=LateDevice())
    return subject_of(geometry, runner)


SUBJECTS: dict[str, MakeSubject] = {
    "model": lambda: model_subject(PlainDevice(CPU)),
    "model on a late device": lambda: model_subject(LateDevice()),
    "graphs on a late device": graphed_subject,
    "fake": lambda: subject_of(FAKE, FakeRunner(FAKE, 4)),
    "late fake": lambda: subject_of(FAKE, LateRunner(FAKE, 4)),
}


@pytest.mark.parametrize("make", SUBJECTS.values(), ids=SUBJECTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[MakeSubject], None], make: MakeSubject) -> None:
    check(make)


def test_nothing_is_touched_before_the_device_is_through() -> None:
    """One copy to the device per step, from memory that stays as it is; and the same tokens as without delay."""
    device = LateDevice()
    late, plain = model_subject(device), model_subject(PlainDevice(CPU))
    for subject in (late, plain):
        subject.add(*PROMPTS)
    assert late.run() == plain.run()
    assert device.num_uploads == late.core.stats().steps_total
    assert device.wrong == []


def test_a_late_device_notices_changed_memory() -> None:
    device = LateDevice()
    host = device.host(4)
    device.upload(host)
    result = device.download(torch.tensor([5]))
    mark = device.mark()
    assert not mark.done()
    assert result.tolist() == [-1]
    host[2] = 7
    mark.wait()
    assert device.wrong
    assert result.tolist() == [5]


@pytest.fixture(params=["plain", "late", "cuda"])
def device(request: pytest.FixtureRequest) -> StepDevice:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return {"plain": lambda: PlainDevice(CPU), "late": LateDevice, "cuda": lambda: CudaDevice(torch.device("cuda"))}[
        request.param
    ]()


def test_contract_of_a_step_device(device: StepDevice) -> None:
    """What is uploaded is there, in order with what follows, and what is downloaded is there once a mark is done."""
    host = device.host(6)
    host.copy_(torch.arange(6))
    sent = device.upload(host)
    back = device.download(sent * 2)
    mark = device.mark()
    if not device.asynchronous:
        assert mark.done()
    mark.wait()
    assert mark.done()
    assert back.tolist() == [0, 2, 4, 6, 8, 10]


def test_staging_grows_and_keeps_its_arrays_apart(device: StepDevice) -> None:
    staging = Staging(device)
    for shapes in ([(3,), (2, 5), (0,), (1,)], [(3000,), (7, 900)], [(17,), (4, 4)]):
        arrays = staging.lay_out(*shapes)
        for index, array in enumerate(arrays):
            array[:] = np.arange(array.size).reshape(array.shape) + 10_000 * index
        tensors = staging.upload()
        copies = [device.download(tensor) for tensor in tensors]
        device.mark().wait()
        assert [tuple(copy.shape) for copy in copies] == shapes
        for array, copy in zip(arrays, copies, strict=True):
            assert copy.tolist() == array.tolist()
        first = tensors[0].data_ptr()
        assert all((tensor.data_ptr() - first) % (8 * ALIGNMENT) == 0 for tensor in tensors if tensor.numel())
