"""Capture and replay of decode steps, on a CPU device that keeps a graph's contract; on a GPU too if there is one."""

import pytest
import torch

from cygnet.engine.graph_buckets import Buckets
from cygnet.engine.runtime.cuda_graphs import CudaGraphDevice, GraphDevice, StaticInputs, estimate_memory
from cygnet.model.attention.torch_cpu import TorchBackend
from model.harness import Harness
from support.graph_checks import BLOCK_SIZE, MAX_LEN, check_decodes, graphed_harness
from support.graph_device import FakeGraphDevice, StaticTorchBackend
from support.tiny_model import tiny_model


@pytest.fixture(params=["fake", "cuda"])
def graph_device(request: pytest.FixtureRequest) -> tuple[GraphDevice, torch.device]:
    if request.param == "fake":
        return FakeGraphDevice(), torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return CudaGraphDevice(torch.device("cuda")), torch.device("cuda")


def test_contract_of_a_graph_device(graph_device: tuple[GraphDevice, torch.device]) -> None:
    """A replay reads what the inputs hold by then, and overwrites the result where it is."""
    device, place = graph_device
    x, y = torch.ones(4, device=place), torch.ones(2, device=place)
    large, large_result = device.capture(lambda: x * 2 + 1)
    small, small_result = device.capture(lambda: y - 1)
    addresses = large_result.data_ptr(), small_result.data_ptr()
    for value in (5.0, -3.0):
        x.fill_(value)
        y.fill_(value)
        large.replay()
        assert large_result.tolist() == [2 * value + 1] * 4
        small.replay()
        assert small_result.tolist() == [value - 1] * 2
    assert addresses == (large_result.data_ptr(), small_result.data_ptr())


def test_graphed_decodes_equal_plain_ones() -> None:
    """Batches of sizes with and without padding, growing and shrinking, over poisoned pools."""
    device, backend = FakeGraphDevice(), StaticTorchBackend()
    graphed = graphed_harness(tiny_model(backend), backend, device, Buckets((1, 2, 4)))
    assert device.captured == [4, 2, 1], "largest first"
    batches = [[0], [0, 1, 2], [2, 1], [0, 1, 2, 3], [3], [1, 3, 0], *[[0, 2, 3]] * 12]
    check_decodes(Harness(tiny_model(TorchBackend()), block_size=BLOCK_SIZE), graphed, batches, [5, 17, 1, 23])
    assert [graph.replays for graph in device.graphs] == [15, 1, 3], "a prompt of one token is such a step too"


def test_what_no_graph_fits_runs_plainly() -> None:
    """Chunks, batches above the largest bucket, and sequences longer than the static tables."""
    device, backend = FakeGraphDevice(), StaticTorchBackend()
    graphed = graphed_harness(tiny_model(backend), backend, device, Buckets((1, 2)))
    batches = [[0, 1, 2], [1], [3], [3]]
    check_decodes(Harness(tiny_model(TorchBackend()), block_size=BLOCK_SIZE), graphed, batches, [5, 2, 9, MAX_LEN])
    assert [graph.replays for graph in device.graphs] == [0, 1]


def test_padding_rows_write_to_the_scratch_block_only() -> None:
    device, backend = FakeGraphDevice(), StaticTorchBackend()
    harness = graphed_harness(tiny_model(backend), backend, device, Buckets((4,)))
    scratch = [set(range(200)) - set(pool.free) for pool in (harness.full, harness.swa) if pool is not None]
    before = [layer.key.clone() for layer in harness.full.layers]
    check_decodes(Harness(tiny_model(TorchBackend()), block_size=BLOCK_SIZE), harness, [[0], [0]], [3])
    assert [len(blocks) for blocks in scratch] == [1, 1]
    for old, layer in zip(before, harness.full.layers, strict=True):
        written = (old.isnan() & ~layer.key.isnan()).flatten(2).any(-1)
        assert int(written.sum()) == 3 + 2, "the request's five tokens, and nothing of the padding"
        assert bool(layer.key[next(iter(scratch[0])), 1:].isnan().all()), "of the scratch block, the first slot"


def test_padding_is_renewed_when_a_batch_shrinks() -> None:
    harness = Harness(tiny_model(StaticTorchBackend()), block_size=BLOCK_SIZE)
    device = FakeGraphDevice()
    backend = StaticTorchBackend()
    graphed = graphed_harness(tiny_model(backend), backend, device, Buckets((4,)))
    inputs: StaticInputs = graphed.model._graphs._inputs  # type: ignore[union-attr]
    check_decodes(harness, graphed, [[0, 1, 2], [1]], [9, 6, 8])
    static = inputs.view(4)
    assert static.token_ids[1:].tolist() == static.positions[1:].tolist() == [0, 0, 0]
    slots = static.full.slot_mapping[1:]
    assert len(set(slots.tolist())) == 1
    assert static.full.block_table[1:, 0].tolist() == (slots // BLOCK_SIZE).tolist()


def test_estimate_grows_with_the_model() -> None:
    memory = estimate_memory(tiny_model(TorchBackend()).description, 4)
    assert memory.pool_bytes_per_row > 20 * 4
    assert memory.graph_bytes > 0
