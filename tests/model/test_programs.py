"""Recorded decode steps: the same hidden states as step by step from Python, whatever the batch does."""

import random
from collections.abc import Callable

import pytest
import torch

from cygnet.model.cpu import programs
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from model.harness import Harness, Request
from model.tiny import Tiny
from support.gates import Gated

pytest.importorskip("numba")


def built(tiny: Tiny) -> HybridModel:
    """With int8 weights all products are kernels of ours, at any size."""
    return build_model(tiny.checkpoint, dtype=torch.float32, int8=True, step_kernels="numba", attention_backend="numba")


def walk(harness: Harness, seed: int, *, most: int = 5, steps: int = 40) -> list[torch.Tensor]:
    """Chunks and decodes of a few requests, in batches that grow and shrink."""
    rng = random.Random(seed)
    requests = [Request([rng.randrange(160) for _ in range(rng.randint(3, 30))]) for _ in range(most)]
    out = []
    for _ in range(steps):
        work = []
        for request in rng.sample(requests, rng.randint(1, most)):
            missing = len(request.tokens) - request.computed
            if missing == 0:
                request.tokens.append(rng.randrange(160))
                missing = 1
            work.append((request, rng.randint(1, missing)))
        out.append(harness.step_hidden(work))
    return out


@pytest.mark.parametrize("family", ["gemma3", "llama", "mimo", "gpt_oss"])
def test_steps_are_the_same_with_and_without(tiny_model: Callable[[str], Tiny], family: str) -> None:
    model = built(tiny_model(family))
    held = model._programs
    assert held is not None
    for seed in range(3):
        with_programs = walk(Harness(model, seed=seed), seed)
        model._programs = None
        without = walk(Harness(model, seed=seed), seed)
        model._programs = held
        for got, want in zip(with_programs, without, strict=True):
            assert torch.equal(got, want)
    recorded = [program for program in held._programs.values() if program is not None]
    assert bool(recorded) == (family in ("gemma3", "llama")), (
        "a model of plain layers is recorded; one with experts is not"
    )


def test_a_hidden_state_outlives_the_next_step(tiny_model: Callable[[str], Tiny]) -> None:
    harness = Harness(built(tiny_model("gemma3")))
    request = Request([5])
    states = []
    for token in range(6):
        states.append((harness.step_hidden([(request, 1)]), None))
        states[-1] = (states[-1][0], states[-1][0].clone())
        request.tokens.append(token)
    assert all(torch.equal(state, copy) for state, copy in states)


def test_what_computes_between_the_kernels_is_not_recorded(
    tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(tiny_model("gemma3"))
    plain = walk(Harness(model), 1)
    gated = model.ops.gated
    monkeypatch.setattr(model.ops, "gated", lambda x, name: gated(x, name) * 1.0)
    model._programs = programs.StepPrograms()
    for got, want in zip(walk(Harness(model), 1), plain, strict=True):
        assert torch.equal(got, want)
    assert not any(model._programs._programs.values())


def test_a_step_whose_kv_is_on_its_way_waits_layer_by_layer(tiny_model: Callable[[str], Tiny]) -> None:
    """Not as a whole, as a recorded one would have to; with the same result."""
    model = built(tiny_model("gemma3"))
    gated = Gated(model)
    states = []
    for subject in (model, gated):
        harness, request = Harness(subject), Request([5, 6, 7])  # type: ignore[arg-type]
        states.append([harness.hidden(request, 3)])
        for token in range(3):
            request.tokens.append(token)
            states[-1].append(harness.step_hidden([(request, 1)]))
    assert model._programs is not None
    assert any(model._programs._programs.values()), "without a gate it is recorded"
    assert all(torch.equal(got, want) for got, want in zip(*states, strict=True))
    assert gated.gate.waits == list(model.description.layer_groups) * 4


def test_memory_is_bounded(tiny_model: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(tiny_model("gemma3"))
    plain = walk(Harness(model), 2, most=8)
    held = model._programs
    assert held is not None
    sizes = sorted(program.num_bytes for program in held._programs.values() if program is not None)
    assert len(sizes) > 3
    monkeypatch.setattr(programs, "MOST_BYTES", sizes[0] + sizes[1])
    model._programs = programs.StepPrograms()
    for got, want in zip(walk(Harness(model), 2, most=8), plain, strict=True):
        assert torch.equal(got, want)
    kept = [program.num_bytes for program in model._programs._programs.values() if program is not None]
    assert 0 < sum(kept) <= sizes[0] + sizes[1]
    assert len(kept) < len(sizes)


def test_pools_are_told_apart(tiny_model: Callable[[str], Tiny]) -> None:
    """The same model over two pools in turn, as after a change of pools."""
    model = built(tiny_model("gemma3"))
    one, other = Harness(model, seed=0), Harness(model, seed=7)
    first, second = Request([1]), Request([1])
    for token in range(30):
        assert torch.equal(one.step_hidden([(first, 1)]), other.step_hidden([(second, 1)]))
        first.tokens.append(token)
        second.tokens.append(token)
