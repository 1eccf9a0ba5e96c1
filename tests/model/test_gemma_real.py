"""Logits of the real Gemma 3 270M in fp32 against transformers, one-shot and in chunks. Skipped without its weights."""

import argparse
import inspect
from collections.abc import Iterator

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from cygnet.base.errors import ModelLoadError
from cygnet.base.threads import usable_cpus
from cygnet.model.loader import build_model
from cygnet.model.source import ModelSource, find_model
from model.harness import Harness, Request

pytestmark = pytest.mark.slow

NUM_TOKENS = 1300
"""More than twice the window of 511."""


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        return find_model("gemma3-270m")
    except ModelLoadError as error:
        pytest.skip(f"needs the gemma extra: {error}")


@pytest.fixture(scope="module")
def tokens(source: ModelSource) -> list[int]:
    return source.tokenizer().encode(inspect.getsource(argparse))[:NUM_TOKENS]


@pytest.fixture(scope="module")
def oracle_logits(source: ModelSource, tokens: list[int]) -> torch.Tensor:
    """Of every 16th position and the last: all of them would take 1.4 GB."""
    checkpoint = source.checkpoint(dtype=torch.float32)
    config = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    oracle = Gemma3ForCausalLM(Gemma3TextConfig(**config)).eval()
    left = oracle.load_state_dict({name: tensor for name, tensor, _ in checkpoint.tensors()}, strict=False)
    assert set(left.missing_keys) <= {"lm_head.weight"}
    oracle.tie_weights()
    with torch.no_grad():
        return oracle(torch.tensor([tokens]), logits_to_keep=checked(len(tokens))).logits[0]


def checked(count: int) -> torch.Tensor:
    return torch.tensor([*range(0, count - 1, 16), count - 1])


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 300])
def test_logits_are_those_of_transformers(
    source: ModelSource, tokens: list[int], oracle_logits: torch.Tensor, chunk: int
) -> None:
    """Logits reach 30; fp32 rounding over 18 layers moves them by about 1e-4."""
    model = build_model(source.checkpoint(dtype=torch.float32), dtype=torch.float32)
    hidden = Harness(model, block_size=16, num_blocks=128).hidden(Request(tokens), chunk)
    with torch.inference_mode():
        got = model.logits(hidden[checked(len(tokens))])
    torch.testing.assert_close(got, oracle_logits, atol=2e-3, rtol=0)
    assert torch.equal(got.argmax(-1), oracle_logits.argmax(-1))
