"""A lost SWA window is recomputed exactly from full KV alone by replaying `n_swa_layers * window` tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.harness import Harness, Request
from model.tiny import VOCAB, Tiny

CACHED, TAIL = 150, 20


def run_after_replay(
    model: Tiny, dtype: torch.dtype, replayed: int, chunk: int, *, exact: int = 0, rows: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of the tail after its prefix: computed without interruption, and after a rebuild of the window.

    With `exact`, only what makes the last so many tokens' SWA KV right is computed; `rows` gets the number of
    tokens whenever an MLP runs.
    """
    generator = torch.Generator().manual_seed(replayed)
    tokens = torch.randint(0, VOCAB, (CACHED + TAIL,), generator=generator).tolist()
    harness = Harness(model.build(dtype))
    cold = harness.prefill(Request(tokens), chunk)[CACHED:]

    request = Request(tokens[:CACHED])
    harness.prefill(request, chunk)
    harness.drop_swa(request)
    harness.rewind(request, CACHED - replayed, CACHED - exact if exact else 0)
    kept = [layer.key.clone() for layer in harness.full.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args: None if rows is None else rows.append(len(args[0])))
        for layer in harness.model.layers
    ]
    harness.prefill(request, chunk)
    for hook in hooks:
        hook.remove()
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
@pytest.mark.parametrize("chunk", [1000, 13, 4, 1])
def test_a_replay_may_leave_out_what_its_end_does_not_need(
    tiny_model: Callable[[str], Tiny], family: str, chunk: int
) -> None:
    """As exact, with no token in an MLP that no later layer needs, however the replay is cut."""
    model = tiny_model(family)
    description = model.build().description
    geometry = description.kv_geometry(8)
    rows: list[int] = []
    replayed = geometry.rebuild_tokens
    pair = run_after_replay(model, torch.float64, replayed, chunk, exact=geometry.window, rows=rows)
    assert difference(pair) < 1e-10
    sliding = [layer.attention.window is not None for layer in description.layers]
    wanted = [sum(sliding[index + 1 :]) * geometry.window for index in range(len(sliding))]
    assert sum(rows) == sum(wanted) < 0.5 * replayed * len(sliding)


@pytest.mark.parametrize("family", ["gemma3", "mimo", "gpt_oss"])
def test_leaving_out_one_token_more_is_wrong(tiny_model: Callable[[str], Tiny], family: str) -> None:
    model = tiny_model(family)
    geometry = model.build().description.kv_geometry(8)
    pair = run_after_replay(model, torch.float64, geometry.rebuild_tokens, 1000, exact=geometry.window - 1)
    assert not difference(pair) < 1e-8


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
