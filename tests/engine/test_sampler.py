"""The sampler against plain definitions of what each setting means."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.errors import InvalidRequestError
from cygnet.base.sampling import MIN_REPETITION_PENALTY, MIN_TEMPERATURE, SamplingParams
from cygnet.engine.runtime.sampler import SamplingState, sample, uniform

VOCAB = 40


def draw(logits: torch.Tensor, params: SamplingParams, index: int = 0, *, tokens: tuple[int, ...] = (1, 2)) -> int:
    state = SamplingState(params, (), 2)
    state.start((*tokens,))
    return sample(logits[None], [state], [index])[0].token_id


def allowed(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Tokens that top-k, top-p and min-p leave, by definition, one after the other."""
    probs = sorted(enumerate(torch.softmax(logits.double() / params.temperature, -1).tolist()), key=lambda p: -p[1])
    if params.top_k:
        probs = probs[: params.top_k]
    total = sum(p for _, p in probs)
    kept, before = [], 0.0
    for token, p in probs:
        if before < params.top_p * total or params.top_p >= 1.0:
            kept.append((token, p))
        before += p
    return {token for token, p in kept if p >= params.min_p * probs[0][1]}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 39, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_only_allowed_tokens_are_drawn(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=9)
    assert {draw(logits, params, index) for index in range(8)} <= allowed(logits, params)


@pytest.mark.parametrize(
    "settings_",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.5}, {"top_k": 8, "top_p": 0.7}],
)
def test_frequencies_follow_the_probabilities(settings_: dict) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    params = SamplingParams(seed=11, **settings_)
    count = 4000
    seen = Counter(draw(logits, params, index) for index in range(count))
    tokens = sorted(allowed(logits, params))
    probs = torch.softmax(logits.double() / params.temperature, -1)[tokens]
    probs /= probs.sum()
    for token, p in zip(tokens, probs.tolist(), strict=True):
        assert abs(seen[token] / count - p) < 5 * math.sqrt(p * (1 - p) / count) + 1e-3


def test_a_large_vocabulary_needs_no_full_sort_but_gets_the_same() -> None:
    """Flat logits over 5,000 tokens: the nucleus is larger than the prefilter."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(5)) * 0.01
    params = SamplingParams(top_p=0.9, seed=1)
    drawn = {draw(logits, params, index) for index in range(300)}
    assert drawn <= allowed(logits, params)
    top = set(torch.topk(logits, 1024).indices.tolist())
    assert drawn - top, "nothing beyond the prefilter was ever drawn"


def test_same_seed_same_token_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(6, VOCAB)
    params = SamplingParams(seed=5, temperature=1.3)
    others = [SamplingParams(seed=s, top_p=0.5) for s in range(5)]
    alone = sample(logits[:1], [SamplingState(params, (), 1)], [7])[0]
    states = [SamplingState(p, (), 1) for p in (params, *others)]
    assert sample(logits, states, [7] * 6)[0] == alone


def test_seeds_and_positions_give_different_numbers() -> None:
    numbers = {uniform(seed, index) for seed in (-1, 0, 1, 2**62) for index in range(100)}
    assert len(numbers) == 400
    assert all(0 <= u < 1 for u in numbers)


def test_no_seed_means_fresh_randomness() -> None:
    assert SamplingState(SamplingParams(), (), 1).seed != SamplingState(SamplingParams(), (), 1).seed


def test_penalties_by_definition() -> None:
    logits = torch.tensor([2.0, -1.0, 3.0, 0.5, 1.0])
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logprobs=5
    )
    state = SamplingState(params, (), 2)
    state.start((1, 2, 2, 0, 0))  # prompt 1, 2; output 2, 0, 0
    token = sample(logits[None].clone(), [state], [3])[0]
    penalised = [2.0 / 2 - 1.0 - 0.25, -1.0 * 2, 3.0 / 2 - 0.5 - 0.25, 0.5, 1.0]
    assert token.token_id == max(range(5), key=penalised.__getitem__)
    assert token.logprobs is not None
    # Reported log probabilities are the model's own, before penalties.
    assert token.logprobs.top[0][0] == 2
    assert token.logprobs.logprob == pytest.approx(torch.log_softmax(logits, -1)[token.token_id].item(), abs=1e-5)


def test_penalty_state_survives_a_preemption() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    straight = SamplingState(params, (), 1)
    straight.start((1,))
    for token in (4, 4, 5):
        straight.append(token)
    resumed = SamplingState(params, (), 1)
    resumed.start((1, 4, 4, 5))
    assert straight.output_counts == resumed.output_counts == {4: 2, 5: 1}


def test_bias_and_early_stops() -> None:
    logits = torch.zeros(VOCAB)
    assert draw(logits, SamplingParams(temperature=0.0, logit_bias={7: 5.0})) == 7
    state = SamplingState(SamplingParams(temperature=0.0, min_tokens=2, logit_bias={3: 9.0}), (3,), 1)
    assert sample(logits[None], [state], [1])[0].token_id != 3
    assert sample(logits[None], [state], [2])[0].token_id == 3


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Divided by it, logits would overflow, and the draw be from no distribution at all."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 30
    for settings_ in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        params = SamplingParams(temperature=temperature, seed=1, **settings_)
        params.validate()
        assert draw(logits, params) == int(logits.argmax())


def test_the_smallest_settings_together_still_leave_a_distribution() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 1000
    params = SamplingParams(temperature=MIN_TEMPERATURE, repetition_penalty=MIN_REPETITION_PENALTY, seed=1)
    params.validate()
    best = int(logits.argmax())
    assert draw(logits, params, tokens=(best, best)) == best
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1e-38).validate()


def test_more_logprobs_than_tokens() -> None:
    state = SamplingState(SamplingParams(temperature=0.0, logprobs=20), (), 1)
    token = sample(torch.randn(1, 7), [state], [0])[0]
    assert token.logprobs is not None
    assert len(token.logprobs.top) == 7


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    draw(logits[0], SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias={1: 3.0}, logprobs=3))
    assert torch.equal(logits, before)


def test_logprobs_of_greedy_and_chosen_only() -> None:
    logits = torch.randn(1, VOCAB)
    state = SamplingState(SamplingParams(temperature=0.0, logprobs=0), (), 1)
    token = sample(logits, [state], [0])[0]
    assert token.token_id == int(logits.argmax())
    assert token.logprobs is not None
    assert token.logprobs.top == []
