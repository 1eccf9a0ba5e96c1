"""Logits of the real Gemma 3 270M in fp32 against transformers, one-shot and in chunks. Skipped without its weights."""

import argparse
import inspect

import pytest
import torch

from cygnet.model.loader import build_model
from cygnet.model.source import ModelSource
from model.harness import Harness, Request
from support.gemma_oracle import gemma_oracle

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_threads")]

NUM_TOKENS = 1300
"""More than twice the window of 511."""


@pytest.fixture(scope="module")
def tokens(gemma_source: ModelSource) -> list[int]:
    return gemma_source.tokenizer().encode(inspect.getsource(argparse))[:NUM_TOKENS]


@pytest.fixture(scope="module")
def oracle_logits(gemma_source: ModelSource, tokens: list[int]) -> torch.Tensor:
    """Of every 16th position and the last: all of them would take 1.4 GB."""
    with torch.no_grad():
        return gemma_oracle(gemma_source)(torch.tensor([tokens]), logits_to_keep=checked(len(tokens))).logits[0]


def checked(count: int) -> torch.Tensor:
    return torch.tensor([*range(0, count - 1, 16), count - 1])


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 300])
def test_logits_are_those_of_transformers(
    gemma_source: ModelSource, tokens: list[int], oracle_logits: torch.Tensor, chunk: int
) -> None:
    """Logits reach 30; fp32 rounding over 18 layers moves them by about 1e-4."""
    model = build_model(gemma_source.checkpoint(dtype=torch.float32), dtype=torch.float32)
    hidden = Harness(model, block_size=16, num_blocks=128).hidden(Request(tokens), chunk)
    with torch.inference_mode():
        got = model.logits(hidden[checked(len(tokens))])
    torch.testing.assert_close(got, oracle_logits, atol=2e-3, rtol=0)
    assert torch.equal(got.argmax(-1), oracle_logits.argmax(-1))
