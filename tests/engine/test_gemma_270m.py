"""The real Gemma 3 270M in fp32 against transformers: prompts of 20 to 6,000 tokens, rebuilds at 10K and 20K.

Takes minutes. The oracle's weights come from our own reading of the GGUF file, which `tests/model` checks by itself.
"""

import argparse
import inspect
from pathlib import Path

import pytest
import torch

from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.local import LocalEngine
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from cygnet.model.source import ModelSource
from support.gemma_oracle import gemma_oracle
from support.scenarios import (
    Answer,
    Report,
    ask_oracle,
    check_batch,
    check_cache_states,
    check_chunk_sizes,
    check_tiers,
    engine_for,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("all_threads")]

LENGTHS = (20, 60, 150, 300, 510, 512, 700, 1100, 1600, 2500, 4000, 6000)
NUM_TOKENS = 12
SETS = ("kv.memory=1GiB", "engine.max_num_batched_tokens=1024")


@pytest.fixture(scope="module")
def model(gemma_source: ModelSource) -> HybridModel:
    return build_model(gemma_source.checkpoint(dtype=torch.float32), dtype=torch.float32)


@pytest.fixture(scope="module")
def text(gemma_source: ModelSource) -> list[int]:
    """Tokens of a long real text."""
    ids = gemma_source.tokenizer().encode(inspect.getsource(argparse))
    assert len(ids) > 20_100
    return ids


@pytest.fixture(scope="module")
def answers(gemma_source: ModelSource, text: list[int]) -> dict[int, Answer]:
    """Prompts from different places of the text, so that none is another's prefix."""
    oracle = gemma_oracle(gemma_source)
    bos = text[0]
    return {n: ask_oracle(oracle, [bos, *text[17 * n % 9000 :][: n - 1]], NUM_TOKENS) for n in LENGTHS}


def engine(model: HybridModel, *sets: str) -> LocalEngine:
    return engine_for(model, *SETS, *sets)


def test_every_state_of_the_cache(model: HybridModel, answers: dict[int, Answer]) -> None:
    report = Report()
    check_cache_states(engine(model), list(answers.values()), report, "gemma")
    print("ties:", report.ties)
    assert len(report.ties) <= 2


def test_every_tier(model: HybridModel, answers: dict[int, Answer], tmp_path: Path) -> None:
    report = Report()
    sets = ("kv.host_cache=1GiB", f"kv.store={tmp_path}:2GiB", "kv.store_wait=wait")
    chosen = [answers[length] for length in (60, 512, 1600, 4000)]
    check_tiers(lambda: engine(model, *sets), chosen, report, least=100, name="gemma")
    print("ties:", report.ties)
    assert len(report.ties) <= 2


def test_batch_of_24(model: HybridModel, answers: dict[int, Answer]) -> None:
    report = Report()
    check_batch(engine(model), list(answers.values()), report, "gemma")
    print("ties:", report.ties)
    assert len(report.ties) <= 2


def test_chunk_sizes(model: HybridModel, answers: dict[int, Answer]) -> None:
    report = Report()
    make = lambda chunk: engine(model, f"engine.max_num_batched_tokens={chunk}")  # noqa: E731
    check_chunk_sizes(make, list(answers.values()), (16, 300, 4096), report)
    print("ties:", report.ties)
    assert len(report.ties) <= 2


def test_rebuild_at_10k_and_20k(model: HybridModel, text: list[int]) -> None:
    """The windows of a 20K session are gone, its full KV is not: a replay of R = 15 x 511 tokens brings one back.

    The cold runs of the same engine are the oracle here; `test_every_state_of_the_cache` ties those to transformers.
    """
    served = engine(model, "kv.retention=[]")
    for length in (20_000, 10_000):
        (cold,), (cached,) = run(served, [_ask(text[:length])], salt=str(length))
        assert cached == 0
        assert served.core.kv.tree.num_checkpoints == 0
        before = served.stats()
        (rebuilt,), (cached,) = run(served, [_ask(text[:length])], salt=str(length))
        after = served.stats()
        full_hit = (length - 1) // 16 * 16
        assert cached == (full_hit - 7665) // 16 * 16
        assert after.rebuilt_tokens_total - before.rebuilt_tokens_total == full_hit - cached
        computed = after.computed_tokens_total - before.computed_tokens_total
        print(f"{length} tokens: full hit {full_hit}, computed {computed} of {length + NUM_TOKENS - 1}")
        assert computed == length - cached + NUM_TOKENS - 1
        assert rebuilt == cold


def _ask(prompt: list[int]) -> Answer:
    return Answer(tuple(prompt), (0,) * NUM_TOKENS, ())


def test_seeded_text_does_not_depend_on_the_batch(model: HybridModel, answers: dict[int, Answer]) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=s, max_tokens=12, ignore_eos=True) for s in range(6)]
    prompts = [answers[n].prompt for n in (20, 60, 150, 300, 20, 60)]
    together = engine(model).generate(prompts, params)
    for prompt, param, tokens in zip(prompts, params, together, strict=True):
        assert engine(model).generate([prompt], param) == [tokens]
    assert together[0] != together[4]
