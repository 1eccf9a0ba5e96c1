"""Logits and greedy tokens against transformers, in fp32, for every way of cutting the work into steps.

The harness poisons every slot that is not live, so these tests also show that no dead slot is read.
"""

import copy
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor

from model.harness import Harness, Request
from model.tiny import FAMILIES, VOCAB, Tiny

TinyModel = Callable[[str], Tiny]

TOLERANCE = 2e-4
"""Absolute, on logits of size 6 to 8: fp32 rounding through 3 to 8 layers (about 4e-5 is seen)."""


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(model: Tiny, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model.oracle(torch.tensor([tokens])).logits[0]


def oracle_greedy(model: Tiny, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [200, 1, 3, 7, 16, 33])
def test_chunked_prefill_gives_the_oracles_logits(tiny_model: TinyModel, family: str, chunk: int) -> None:
    model = tiny_model(family)
    tokens = random_tokens(131, seed=chunk)
    got = Harness(model.build(), seed=chunk).prefill(Request(tokens), chunk)
    assert_close(got, oracle_logits(model, tokens))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [200, 1, 7])
def test_plain_torch_gives_the_oracles_logits(tiny_model: TinyModel, family: str, chunk: int) -> None:
    model = tiny_model(family)
    tokens = random_tokens(131, seed=chunk)
    got = Harness(model.build(backend="torch", kernels="torch"), seed=chunk).prefill(Request(tokens), chunk)
    assert_close(got, oracle_logits(model, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_backend_gives_the_oracles_logits(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(60, seed=5)
    got = Harness(model.build(backend="reference"), block_size=5).prefill(Request(tokens), 13)
    assert_close(got, oracle_logits(model, tokens))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1000, 9])
def test_greedy_tokens_are_the_oracles(tiny_model: TinyModel, family: str, chunk: int) -> None:
    model = tiny_model(family)
    prompt = random_tokens(45, seed=11)
    assert Harness(model.build()).greedy(prompt, 20, chunk=chunk) == oracle_greedy(model, prompt, 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_that_mix_prefills_and_decodes(tiny_model: TinyModel, family: str) -> None:
    """Requests of lengths 3 to 120 decode while others are still in prefill; each gets its own logits."""
    model = tiny_model(family)
    harness = Harness(model.build(), block_size=8)
    requests = [Request(random_tokens(n, seed=n)) for n in (120, 3, 57, 90, 31, 14)]
    prompts = [len(r.tokens) - 12 if len(r.tokens) > 12 else 1 for r in requests]
    collected: list[list[Tensor]] = [[] for _ in requests]
    step = 0
    while any(r.computed < len(r.tokens) for r in requests):
        work = []
        for index, request in enumerate(requests):
            if step >= index and request.computed < len(request.tokens):
                left = prompts[index] - request.computed
                work.append((index, min(left, 17) if left > 0 else 1))
        logits = harness.step([(requests[index], count) for index, count in work])
        for (index, _), rows in zip(work, logits.split([count for _, count in work]), strict=True):
            collected[index].append(rows)
        step += 1
    for request, rows in zip(requests, collected, strict=True):
        assert_close(torch.cat(rows), oracle_logits(model, request.tokens))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["reference", "torch", "numba"])
def test_only_wanted_rows(tiny_model: TinyModel, family: str, backend: str) -> None:
    """Steps that ask for all, some, or none of their requests' last rows give those, and leave all KV behind."""
    model = tiny_model(family)
    harness = Harness(model.build(backend=backend), block_size=5)
    requests = [Request(random_tokens(n, seed=n)) for n in (40, 33, 50)]
    want = [oracle_logits(model, request.tokens) for request in requests]
    steps = [((17, 1, 9), []), ((1, 9, 20), [0, 2]), ((20, 1, 1), [1]), ((2, 22, 20), [0, 1, 2])]
    for counts, wanted in steps:
        hidden = harness.step_hidden(list(zip(requests, counts, strict=True)), wanted)
        assert len(hidden) == len(wanted)
        for row, index in zip(hidden, wanted, strict=True):
            with torch.inference_mode():
                assert_close(harness.model.logits(row[None])[0], want[index][requests[index].computed - 1])


def test_freed_swa_blocks_are_reused(tiny_model: TinyModel) -> None:
    """A prompt many times the SWA pool is served, since blocks behind the window come back."""
    harness = Harness(tiny_model("gemma3").build(), block_size=4, num_blocks=100)
    assert harness.swa is not None
    del harness.swa.free[7:]
    tokens = random_tokens(300, seed=3)
    got = harness.prefill(Request(tokens), 9)
    assert_close(got, oracle_logits(tiny_model("gemma3"), tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_no_further_from_fp32_than_transformers_bf16(tiny_model: TinyModel, family: str) -> None:
    """By the median of prompts' medians: a router near a tie may pick another expert, and all that follows moves."""
    model = tiny_model(family)
    rounded, built = copy.deepcopy(model.oracle).to(torch.bfloat16), model.build(torch.bfloat16)
    our_errors, their_errors = [], []
    for seed in range(20):
        tokens = random_tokens(80, seed=seed)
        exact = oracle_logits(model, tokens)
        with torch.no_grad():
            theirs = rounded(torch.tensor([tokens])).logits[0].float()
        ours = Harness(built).prefill(Request(tokens), 23)
        assert ours.dtype == torch.float32
        our_errors.append(float((ours - exact).abs().median()))
        their_errors.append(float((theirs - exact).abs().median()))
    assert median(our_errors) < 1.25 * median(their_errors)
