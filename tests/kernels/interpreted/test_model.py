"""A whole tiny model on the Triton backend and kernels against the same model in plain PyTorch."""

import torch

from cygnet.base.config import resolve
from cygnet.base.sampling import SamplingParams
from cygnet.engine.graph_buckets import Buckets
from cygnet.engine.runtime.setup import assemble
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


def test_an_engine_with_graphs() -> None:
    """From the setting to the tokens: chunks run plainly, decodes of two requests in a graph of three."""
    sets = ["kv.memory=2MiB", "kv.block_size=4", "kv.poison=true", "engine.audit=step"]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5], list(range(20, 37))]
    plain = assemble(resolve(sets=sets).config, tiny_model(ReferenceBackend()), name="test")
    device = FakeGraphDevice()
    config = resolve(sets=[*sets, "engine.cuda_graphs=[3]"]).config
    graphed = assemble(config, fused_model(TritonBackend()), name="test", graph_device=device)
    assert graphed.generate(prompts, params) == plain.generate(prompts, params)
    assert device.graphs[0].replays == 3
