"""An engine whose decode steps are graphs, end to end with a fake graph device; and who gets graphs at all."""

import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from cygnet.base.config import Config, resolve
from cygnet.base.errors import ConfigError
from cygnet.base.sampling import SamplingParams
from cygnet.engine.graph_buckets import candidate_sizes
from cygnet.engine.runtime.graph_setup import choose_graphs
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.setup import assemble
from cygnet.kv.runtime.device_pool import DevicePool
from cygnet.kv.sizing import PoolSizes, min_pools
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.decoder import HybridModel
from cygnet.model.description import DenseMlp
from cygnet.model.loader import build_model
from cygnet.model.ops import TorchOps
from model import tiny
from model.harness import FolderCheckpoint
from support.graph_device import FakeGraphDevice, StaticTorchBackend
from support.scenarios import Answer, Report, ask_oracle, check_batch, check_cache_states
from support.tiny_model import tiny_model

BASE = ("kv.block_size=4", "kv.memory=4MiB", "engine.max_num_batched_tokens=64", "kv.poison=true", "engine.audit=step")
LENGTHS = (1, 3, 4, 5, 12, 13, 40, 77)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(*sets: str) -> Config:
    return resolve(sets=[*BASE, *sets]).config


class Case:
    """A tiny model whose decodes can be captured, and what transformers says."""

    def __init__(self, family: str, folder: Any) -> None:
        oracle = tiny.FAMILIES[family]()
        oracle.save_pretrained(folder)
        self.model: HybridModel = build_model(FolderCheckpoint(folder), dtype=torch.float32, step_kernels="torch")  # type: ignore[arg-type]
        self.model.attention_backend = StaticTorchBackend()
        rnd = Random(family)
        self.answers = [ask_oracle(oracle, [rnd.randrange(tiny.VOCAB) for _ in range(n)], 8) for n in LENGTHS]

    def engine(self, device: FakeGraphDevice, *sets: str) -> LocalEngine:
        return assemble(config_of(*sets), self.model, name="test", graph_device=device)


@pytest.fixture(scope="module", params=["gemma3", "llama"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_same_tokens_as_without_graphs(case: Case) -> None:
    """In every state of the cache and in batches that are padded, over poisoned pools."""
    device, report = FakeGraphDevice(), Report()
    engine = case.engine(device, "engine.cuda_graphs=[3, 1, 8]", "engine.max_num_seqs=8")
    assert device.captured == [8, 3, 1]
    check_cache_states(engine, case.answers, report, "graphs")
    check_batch(engine, case.answers, report, "graphs")
    check_batch(engine, case.answers[4:5], report, "graphs")
    assert report.ties == []
    assert all(graph.replays for graph in device.graphs)


def test_what_is_no_decode_of_few_runs_without_a_graph(case: Case) -> None:
    device, report = FakeGraphDevice(), Report()
    engine = case.engine(device, "engine.cuda_graphs=[2]")
    check_batch(engine, case.answers[:4], report, "more than fit")
    steps = engine.stats().steps_total
    assert 0 < device.graphs[0].replays < steps
    assert report.ties == []


def pool_of(engine: LocalEngine) -> DevicePool:
    return engine._runner._pool  # type: ignore[attr-defined]


def test_padding_touches_nothing_but_its_own_block(case: Case) -> None:
    """Whatever was never anybody's is still NaN; of the scratch blocks, all but the slot that padding writes."""
    engine = case.engine(FakeGraphDevice(), "engine.cuda_graphs=[8]")
    answer: Answer = case.answers[4]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert engine.generate([answer.prompt], params) == [list(answer.tokens)]
    pool = pool_of(engine)
    computed = len(answer.prompt) + len(answer.tokens) - 1
    for layers, scratch in ((pool.full, pool.scratch_full), (pool.swa, pool.scratch_swa)):
        for layer in layers:
            written = ~layer.key.isnan().flatten(2).all(-1)
            assert written[scratch].tolist() == [True, False, False, False]
            assert int(written.sum()) - 1 <= computed


def test_scratch_blocks_are_nobodys(case: Case) -> None:
    """They are in the tensors, and in no count of blocks."""
    engine = case.engine(FakeGraphDevice(), "engine.cuda_graphs=on", "engine.max_num_seqs=4")
    kv, pool = engine.core.kv, pool_of(engine)
    assert (pool.scratch_full, pool.scratch_swa) == (kv.sizes.full_blocks, kv.sizes.swa_blocks)
    assert len(pool.full[0].key) == kv.sizes.full_blocks + 1
    full, swa = kv.pool_stats()
    assert (full.num_blocks, swa.num_blocks) == (kv.sizes.full_blocks, kv.sizes.swa_blocks)
    assert not engine.core.audit()


def test_graphs_are_taken_off_the_kv_budget(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """Both pools, scratch blocks and what the graphs are estimated at make up the budget, to within a block."""
    geometry = case.model.description.kv_geometry(4)
    budget = 4 << 20
    without = assemble(config_of("engine.cuda_graphs=off"), case.model, name="test", graph_device=FakeGraphDevice())
    assert pool_of(without).scratch_full is None
    with caplog.at_level(logging.INFO, "cygnet.engine"):
        engine = case.engine(FakeGraphDevice(), "engine.cuda_graphs=[1, 4]")
    graphs = engine._runner._forward._inputs  # type: ignore[attr-defined]
    inputs = sum(
        t.nbytes for t in (graphs._token_ids, graphs._positions, *graphs._tables.values(), *graphs._slots.values())
    )
    left = budget - pool_of(engine).num_bytes
    assert left > inputs > 0
    assert pool_of(engine).num_bytes < pool_of(without).num_bytes
    (record,) = [r for r in caplog.records if "captured" in r.message]
    assert "as 2 CUDA graphs" in record.message
    assert "batches of 1, 4" in record.message
    choice = choose_graphs(config_of("engine.cuda_graphs=[1, 4]"), case.model, geometry, budget, FakeGraphDevice())
    assert choice.graph_bytes >= inputs
    slack = left - choice.graph_bytes
    assert 0 <= slack < geometry.full.block_bytes(4) + geometry.swa.block_bytes(4)


def dense(backend: StaticTorchBackend | TorchBackend) -> HybridModel:
    return tiny_model(backend, mlp=DenseMlp(24, "silu"))


def test_auto_takes_an_eighth_at_most_and_leaves_what_is_needed() -> None:
    model = dense(StaticTorchBackend())
    all_of_them = FakeGraphDevice()
    assemble(config_of("kv.memory=1GiB", "engine.max_num_seqs=32"), model, name="test", graph_device=all_of_them)
    assert tuple(reversed(all_of_them.captured)) == candidate_sizes(32)
    some = FakeGraphDevice()
    assemble(config_of("kv.memory=8MiB", "engine.max_num_seqs=32"), model, name="test", graph_device=some)
    assert 0 < len(some.captured) < len(all_of_them.captured)
    geometry = model.description.kv_geometry(4)
    least = min_pools(geometry, block_size=4, chunk=64, model_max_len=model.description.max_model_len).num_bytes
    none = FakeGraphDevice()
    assemble(config_of(f"kv.memory={least}"), model, name="test", graph_device=none)
    assert none.captured == []


def test_auto_without_a_gpu_or_without_the_kernels_means_none() -> None:
    engine = assemble(config_of(), dense(StaticTorchBackend()), name="test")
    assert pool_of(engine).scratch_full is None
    for model in (dense(TorchBackend()), tiny_model(StaticTorchBackend())):
        device = FakeGraphDevice()
        assemble(config_of(), model, name="test", graph_device=device)
        assert device.captured == []


class FusedOps(TorchOps):
    def fuses_experts(self, spec: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("on", "'on', but this attention backend makes a new plan"),
        ("[2]", r"\[2\], but these step kernels run experts in plain code"),
        ("on", "'on', but the model is not on a GPU"),
        ("[2, 65]", "no step has more than engine.max_num_seqs = 64"),
        ("[2]", "below the minimum of .* and .* for CUDA graphs of up to 2 requests"),
    ],
    ids=["backend", "experts", "device", "size", "memory"],
)
def test_graphs_that_can_not_be_had_are_refused(wanted: str, words: str, request: pytest.FixtureRequest) -> None:
    case = request.node.callspec.id
    model = dense(TorchBackend() if case == "backend" else StaticTorchBackend())
    if case == "experts":
        model = tiny_model(StaticTorchBackend())
    memory = "kv.memory=20000" if case == "memory" else "kv.memory=4MiB"
    device = None if case == "device" else FakeGraphDevice()
    with pytest.raises(ConfigError, match=words):
        assemble(config_of(f"engine.cuda_graphs={wanted}", memory), model, name="test", graph_device=device)


def test_experts_in_one_kernel_can_be_captured() -> None:
    device = FakeGraphDevice()
    assemble(
        config_of("engine.cuda_graphs=[1]"), tiny_model(StaticTorchBackend(), FusedOps()), name="t", graph_device=device
    )
    assert device.captured == [1]


def test_a_pool_without_scratch_has_the_blocks_it_is_told() -> None:
    geometry = dense(TorchBackend()).description.kv_geometry(4)
    sizes = PoolSizes(4, 5, 3, 20)
    plain, scratch = (DevicePool(geometry, sizes, dtype=torch.float32, device="cpu", scratch=s) for s in (False, True))
    assert plain.num_bytes == sizes.num_bytes(geometry)
    assert scratch.num_bytes == plain.num_bytes + geometry.full.block_bytes(4) + geometry.swa.block_bytes(4)


def test_progress_is_reported() -> None:
    said: list[tuple[str, int, int]] = []
    assemble(
        config_of("engine.cuda_graphs=[1, 2]"),
        dense(StaticTorchBackend()),
        name="test",
        graph_device=FakeGraphDevice(),
        report=lambda *what: said.append(what),
    )
    assert said == [("capturing CUDA graphs", done, 2) for done in range(3)]


@pytest.mark.parametrize("text", ["auto", "off", "on", "[1, 8]"])
def test_the_setting(text: str) -> None:
    value = resolve(sets=[f"engine.cuda_graphs={text}"]).config.engine.cuda_graphs
    assert value == ((1, 8) if text == "[1, 8]" else text)


@pytest.mark.parametrize("text", ["sometimes", "[0]", "4", "[a]"])
def test_a_wrong_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs"):
        resolve(sets=[f"engine.cuda_graphs={text}"])
