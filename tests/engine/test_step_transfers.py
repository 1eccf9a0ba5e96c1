"""Copies in a step of the model runner: same tokens as with the KV in place, each layer waiting for its own loads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from cygnet.base.errors import InvariantError
from cygnet.base.ids import BlockId, RequestId
from cygnet.base.sampling import SamplingParams
from cygnet.engine.graph_buckets import Buckets
from cygnet.engine.plan import NewRequest, ScheduledRequest, StepPlan
from cygnet.engine.runtime.model_runner import ModelRunner
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.runtime.host_pool import HostPool
from cygnet.kv.runtime.transfers import TransferEngine
from cygnet.kv.sizing import PoolSizes
from cygnet.kv.transfers import Copies, Pair, StepTransfers
from cygnet.model.attention.backend import AttentionPlan
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.batch import LayerKV
from cygnet.model.description import AttentionSpec
from model.harness import Request
from support.gates import Gated
from support.graph_checks import graphed_harness
from support.graph_device import FakeGraphDevice, StaticTorchBackend
from support.slow_mover import SlowMover
from support.tiny_model import WINDOW, tiny_model

SIZE = 4
SIZES = PoolSizes(SIZE, 40, 30, 120)
PROMPT = tuple((7 * i + 3) % 50 for i in range(30))
CACHED = 24
"""Tokens whose KV comes from the host: 6 full blocks, and of SWA those that the window before them lies in."""
FULL, SWA = range(6), range((CACHED - WINDOW) // SIZE, 6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pairs(sources: Sequence[int], targets: Sequence[int]) -> tuple[Pair, ...]:
    return tuple((BlockId(a), BlockId(b)) for a, b in zip(sources, targets, strict=True))


def ids(blocks: Sequence[int]) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, blocks))


class TellingBackend(TorchBackend):
    """Says when a layer attends, and then lets the next layer's loads go."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.mover: SlowMover | None = None

    def attend(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: AttentionPlan,
        layer_kv: LayerKV,
    ) -> Tensor:
        self.told.append("attend")
        if self.mover is not None:
            self.mover.let()
        return super().attend(spec, query, key, value, sinks, plan, layer_kv)


@dataclass
class Subject:
    """A runner with poisoned pools on both tiers, and requests that own blocks from `base` on."""

    slow: bool = False
    backend: TellingBackend = field(default_factory=TellingBackend)
    steps: int = 0

    def __post_init__(self) -> None:
        model = tiny_model(self.backend)
        geometry = model.description.kv_geometry(4)
        self.pool = DevicePool(geometry, SIZES, dtype=torch.float32, device="cpu", poison=True)
        self.host = HostPool(geometry, 20, 20, SIZE, torch.float32, poison=True)
        self.mover = SlowMover(self.pool, self.host, free=not self.slow, told=self.backend.told)
        self.engine = TransferEngine(self.pool, self.host, model.description.layer_groups, mover=self.mover)
        self.runner = ModelRunner(model, self.pool, window=geometry.window, eos_token_ids=(), transfers=self.engine)

    def run(self, **plan: object) -> dict[RequestId, int]:
        """One step; the tokens sampled."""
        self.steps += 1
        whole = StepPlan(**{"step": self.steps, "gone": (), "new": (), "requests": (), **plan})  # type: ignore[arg-type]
        result = self.runner.execute(whole)
        assert self.engine.audit() == []
        return {request_id: sampled.token_id for request_id, sampled in result.sampled.items()}

    def prefill(self, name: str, start: int, base: int, **plan: object) -> int:
        """Run `PROMPT` from `start` on, in blocks `base`, ... of both groups; the first token."""
        request_id = RequestId(name)
        blocks = ids(range(base, base + 9))
        window = SWA.start if start else 0
        new = NewRequest(request_id, PROMPT, len(PROMPT), GREEDY, start, 0, 0)
        scheduled = ScheduledRequest(request_id, start, len(PROMPT) - start, 0, blocks, window, blocks[window:], True)
        return self.run(new=(new,), requests=(scheduled,), **plan)[request_id]

    def decode(self, name: str, count: int) -> list[int]:
        """More tokens of a request that has its blocks."""
        request_id = RequestId(name)
        return [
            self.run(requests=(ScheduledRequest(request_id, len(PROMPT) + i, 1, 0, (), 0, (), True),))[request_id]
            for i in range(count)
        ]


def in_place() -> list[int]:
    """Tokens without any copy."""
    subject = Subject()
    return [subject.prefill("a", 0, 0), *subject.decode("a", 4)]


SAVED = Copies(pairs(FULL, [5, 4, 3, 2, 1, 0]), pairs(SWA, [10, 12, 11]))
LOADED = Copies(pairs([5, 4, 3, 2, 1, 0], range(20, 26)), pairs([10, 12, 11], [20 + i for i in SWA]))


@pytest.mark.parametrize("how", ["saved", "evicted"])
def test_same_tokens_from_the_host(how: str) -> None:
    """Its blocks are poisoned in the very step that evicts them, or in the one after it has saved them."""
    subject = Subject()
    want = in_place()
    assert subject.prefill("a", 0, 0) == want[0]
    freed = {"freed_full": ids(range(9)), "freed_swa": ids(range(9)), "gone": (RequestId("a"),)}
    if how == "saved":
        assert subject.run(transfers=StepTransfers(saves=SAVED)) == {}
        subject.run(transfers=StepTransfers(freed_host_full=ids([19])), **freed)
    else:
        subject.run(transfers=StepTransfers(evicted=SAVED), **freed)
    assert all(layer.key[:9].isnan().all() for layer in subject.pool.full + subject.pool.swa)
    # Blocks loaded into are freed, and so poisoned, in the same step.
    loads = {"freed_full": ids(range(20, 29)), "freed_swa": ids(range(20, 29))}
    assert subject.prefill("b", CACHED, 20, transfers=StepTransfers(loads=LOADED), **loads) == want[0]
    assert subject.decode("b", 4) == want[1:]


def test_each_layer_waits_for_its_own_loads() -> None:
    """A layer's loads begin only when the layer before has attended: had the step waited for all of them first, it
    would wait for ever."""
    subject = Subject(slow=True)
    want = in_place()
    subject.prefill("a", 0, 0)
    subject.run(transfers=StepTransfers(saves=SAVED))
    subject.backend.mover = subject.mover
    subject.backend.told.clear()
    subject.mover.let()
    assert subject.prefill("b", CACHED, 20, transfers=StepTransfers(loads=LOADED)) == want[0]
    loads = ("load SWA 0", "load FULL 0", "load SWA 1", "load FULL 1")
    assert subject.backend.told == [told for load in loads for told in (load, "attend")]
    assert subject.decode("b", 4) == want[1:]


@pytest.mark.parametrize("what", ["load FULL 1", "save FULL"])
def test_a_copy_that_fails_ends_the_step(what: str) -> None:
    subject = Subject()
    subject.prefill("a", 0, 0)
    subject.mover.fails.add(what)
    step = StepTransfers(saves=SAVED) if what.startswith("save") else StepTransfers(loads=LOADED)
    with pytest.raises(OSError, match=f"{what} failed"):
        subject.prefill("b", CACHED, 20, transfers=step)
    assert subject.runner.audit({}, ()) != []


def test_copies_without_an_engine_for_them() -> None:
    model = tiny_model(TorchBackend())
    geometry = model.description.kv_geometry(4)
    pool = DevicePool(geometry, SIZES, dtype=torch.float32, device="cpu")
    runner = ModelRunner(model, pool, window=geometry.window, eos_token_ids=())
    with pytest.raises(InvariantError, match="step 7 has copies"):
        runner.execute(StepPlan(7, (), (), (), transfers=StepTransfers(saves=SAVED)))


def test_a_step_is_done_when_its_copies_are() -> None:
    subject = Subject(slow=True)
    pending = subject.runner.launch(StepPlan(1, (), (), (), transfers=StepTransfers(loads=LOADED)))
    assert not pending.done()
    subject.mover.let(4)
    pending.result()
    assert pending.done()
    subject.engine.close()


def test_a_graph_waits_for_all_layers_before_it_is_replayed() -> None:
    device, backend = FakeGraphDevice(), StaticTorchBackend()
    harness = graphed_harness(tiny_model(backend), backend, device, Buckets((1,)))
    sequence = Request([3, 4, 5])
    harness.prefill(sequence, 3)
    gated = Gated(harness.model)
    harness.model = gated  # type: ignore[assignment]
    (graph,) = device.graphs
    replays: list[int] = []
    replay = graph.replay
    graph.replay = lambda: (replays.append(len(gated.gate.waits)), replay())[1]  # type: ignore[method-assign]
    sequence.tokens.append(6)
    harness.step([(sequence, 1)])
    assert (replays, gated.gate.waits) == ([1], ["all"])
