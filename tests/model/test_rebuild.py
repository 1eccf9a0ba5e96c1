"""A lost SWA window is recomputed exactly from full KV alone by replaying `n_swa_layers * window` tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.harness import Harness, Request
from model.tiny import VOCAB, Tiny

CACHED, TAIL = 150, 20


def run_after_replay(model: Tiny, dtype: torch.dtype, replayed: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Logits of the tail after its prefix: computed without interruption, and after a rebuild of the window."""
    generator = torch.Generator().manual_seed(replayed)
    tokens = torch.randint(0, VOCAB, (CACHED + TAIL,), generator=generator).tolist()
    harness = Harness(model.build(dtype))
    cold = harness.prefill(Request(tokens), chunk)[CACHED:]

    request = Request(tokens[:CACHED])
    harness.prefill(request, chunk)
    harness.drop_swa(request)
    harness.rewind(request, CACHED - replayed)
    kept = [layer.key.clone() for layer in harness.full.layers]
    harness.prefill(request, chunk)
    for layer, before in zip(harness.full.layers, kept, strict=True):
        torch.testing.assert_close(layer.key, before, atol=0, rtol=0, equal_nan=True)
    request.tokens = tokens
    return cold, harness.prefill(request, chunk)


def difference(pair: tuple[Tensor, Tensor]) -> float:
    return float((pair[0] - pair[1]).abs().max())


@pytest.mark.parametrize("family", ["gemma3", "mimo", "gpt_oss"])
@pytest.mark.parametrize("chunk", [1000, 13, 4])
def test_replay_is_exact_in_fp64(tiny_model: Callable[[str], Tiny], family: str, chunk: int) -> None:
    model = tiny_model(family)
    geometry = model.build().description.kv_geometry(8)
    assert 0 < geometry.rebuild_tokens < CACHED
    assert difference(run_after_replay(model, torch.float64, geometry.rebuild_tokens, chunk)) < 1e-10


@pytest.mark.parametrize("family", ["gemma3", "mimo", "gpt_oss"])
def test_one_window_less_is_not(tiny_model: Callable[[str], Tiny], family: str) -> None:
    model = tiny_model(family)
    geometry = model.build().description.kv_geometry(8)
    short = geometry.rebuild_tokens - geometry.window
    assert difference(run_after_replay(model, torch.float64, short, 1000)) > 1e-8


@pytest.mark.parametrize("family", ["gemma3", "mimo", "gpt_oss"])
def test_replay_is_as_good_as_a_cold_run_in_fp32(tiny_model: Callable[[str], Tiny], family: str) -> None:
    model = tiny_model(family)
    replayed = model.build().description.kv_geometry(4).rebuild_tokens
    assert difference(run_after_replay(model, torch.float32, replayed, 29)) < 1e-4
