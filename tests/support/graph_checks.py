"""Decode steps through graphs against the same steps without: what must hold for any capturable backend."""

import torch
from torch import Tensor

from cygnet.engine.graph_buckets import Buckets
from cygnet.engine.runtime.cuda_graphs import DecodeGraphs, GraphDevice, GroupLayout
from cygnet.model.attention.backend import GraphAttentionBackend
from cygnet.model.batch import ForwardBatch
from cygnet.model.decoder import HybridModel
from model.harness import Harness, Request
from support.tiny_model import WINDOW

BLOCK_SIZE = 4
MAX_LEN = 48


class Graphed:
    """Stands in for a model in the harness; steps go through graphs where they fit."""

    def __init__(self, model: HybridModel, graphs: DecodeGraphs) -> None:
        self._model = model
        self._graphs = graphs

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self._graphs(batch).clone()


def graphed_harness(
    model: HybridModel, backend: GraphAttentionBackend, device: GraphDevice, buckets: Buckets
) -> Harness:
    """A harness over poisoned pools with one scratch block taken from each."""
    harness = Harness(model, block_size=BLOCK_SIZE, num_blocks=200)
    assert harness.swa is not None
    groups = {
        "full": GroupLayout(harness.full.layers, MAX_LEN // BLOCK_SIZE, harness.full.free.pop()),
        "swa": GroupLayout(harness.swa.layers, -(-WINDOW // BLOCK_SIZE) + 2, harness.swa.free.pop()),
    }
    graphs = DecodeGraphs(model, backend, device, buckets, block_size=BLOCK_SIZE, groups=groups)
    harness.model = Graphed(model, graphs)  # type: ignore[assignment]
    return harness


def check_decodes(plain: Harness, graphed: Harness, batches: list[list[int]], prompts: list[int]) -> None:
    """Prefill the prompts (by length) in both; then decode the requests of each batch, a token each, and compare."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 50, (count,), generator=generator).tolist()

    starts = [tokens(length) for length in prompts]
    sides = [(harness, [Request(list(start)) for start in starts]) for harness in (plain, graphed)]
    for harness, requests in sides:
        for request in requests:
            harness.prefill(request, 7)
    for batch in batches:
        new = tokens(len(batch))
        logits = []
        for harness, requests in sides:
            for index, token in zip(batch, new, strict=True):
                requests[index].tokens.append(token)
            logits.append(harness.step([(requests[index], 1) for index in batch]))
        assert logits[1].isfinite().all()
        torch.testing.assert_close(logits[1], logits[0], atol=2e-5, rtol=1e-4)
