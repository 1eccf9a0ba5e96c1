"""A whole tiny model on the Triton backend and kernels against the same model in plain PyTorch."""

import torch

from cygnet.engine.graph_buckets import Buckets
from cygnet.model.attention.reference import ReferenceBackend
from cygnet.model.attention.triton_paged import TritonBackend
from cygnet.model.decoder import HybridModel
from cygnet.model.kernels.ops import TritonOps
from model.harness import Harness, Request
from support.graph_checks import BLOCK_SIZE, check_decodes, graphed_harness
from support.graph_device import FakeGraphDevice
from support.tiny_model import tiny_model


def fused_model(backend: TritonBackend) -> HybridModel:
    """As on a GPU."""
    return tiny_model(backend, TritonOps())


def test_chunked_prefill_and_rebuild() -> None:
    """Logits of a prompt in chunks; then a lost window is replayed over full KV that is read and not written."""
    tokens = torch.randint(0, 50, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    harnesses = [
        Harness(model, block_size=BLOCK_SIZE)
        for model in (tiny_model(ReferenceBackend()), fused_model(TritonBackend()))
    ]
    requests = [Request(list(tokens)) for _ in harnesses]
    want, got = (h.prefill(r, 16) for h, r in zip(harnesses, requests, strict=True))
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    replayed = []
    for harness, request in zip(harnesses, requests, strict=True):
        harness.drop_swa(request)
        harness.rewind(request, 21 - 18)
        request.tokens += [7, 8]
        replayed.append(harness.prefill(request, 11)[-2:])
    torch.testing.assert_close(replayed[1], replayed[0], atol=2e-4, rtol=1e-4)


def test_decodes_through_graphs() -> None:
    backend, device = TritonBackend(), FakeGraphDevice()
    graphed = graphed_harness(fused_model(backend), backend, device, Buckets((1, 4)))
    plain = Harness(tiny_model(ReferenceBackend()), block_size=BLOCK_SIZE)
    check_decodes(plain, graphed, [[0, 1, 2], [2], [1, 0]], [5, 10, 3])
    assert [graph.replays for graph in device.graphs] == [2, 1]
