"""One claim, many ways to run it: the same greedy prompt gives the same tokens whatever the cache and the batch do.

Used with tiny random models and with the real Gemma; the oracle is transformers, in fp32.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cygnet.base.config import Config, resolve
from cygnet.base.messages import AddRequest, RequestOutput
from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.setup import assemble
from cygnet.model.decoder import HybridModel

TIE = 1e-3
"""Two logits closer than this in fp32 may swap by rounding; a difference there is a tie, and is reported."""
SETTLE_S = 60


@dataclass(frozen=True)
class Answer:
    """What the oracle says: greedy tokens, and by how much each beat the second best."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass
class Report:
    """Ties met while comparing, by scenario. Answers may differ where the margin is below `tie`."""

    ties: list[str] = field(default_factory=list)
    tie: float = TIE

    def compare(self, scenario: str, answer: Answer, got: Sequence[int]) -> None:
        """Assert equality up to a tie; what follows a tie can't be compared."""
        assert len(got) == len(answer.tokens), scenario
        for index, (want, have) in enumerate(zip(answer.tokens, got, strict=True)):
            if want != have:
                where = f"{scenario}: prompt of {len(answer.prompt)}, token {index}"
                assert answer.margins[index] < self.tie, (
                    f"{where}: {have} instead of {want}, margin {answer.margins[index]}"
                )
                self.ties.append(where)
                return


def ask_oracle(oracle: torch.nn.Module, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Greedy tokens of a transformers model, EOS or not."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = oracle.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
        )
    top = [torch.topk(step[0].float(), 2).values for step in out.logits]
    return Answer(
        tuple(prompt), tuple(out.sequences[0, len(prompt) :].tolist()), tuple(float(t[0] - t[1]) for t in top)
    )


def engine_for(model: HybridModel, *sets: str) -> LocalEngine:
    """An engine around a loaded model, poisoned and audited at every step."""
    config: Config = resolve(sets=["kv.poison=true", "engine.audit=step", *sets]).config
    return assemble(config, model, name="test")


def run(engine: LocalEngine, answers: Sequence[Answer], *, salt: str = "") -> tuple[list[list[int]], list[int]]:
    """Run all prompts at once; output tokens and cached tokens of each."""
    tokens, last = run_to_end(engine, answers, salt=salt)
    return tokens, [output.num_cached_tokens for output in last]


def run_to_end(
    engine: LocalEngine, answers: Sequence[Answer], *, salt: str = ""
) -> tuple[list[list[int]], list[RequestOutput]]:
    """Run all prompts at once; output tokens and last output of each."""
    names = [f"{salt}/{engine.core.num_added}/{index}" for index in range(len(answers))]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    last: dict[str, RequestOutput] = {}
    for name, answer in zip(names, answers, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=len(answer.tokens), ignore_eos=True)
        engine.add(AddRequest(name, list(answer.prompt), params, cache_salt=salt))
    while engine.busy:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    return list(tokens.values()), [last[name] for name in names]


def settle(engine: LocalEngine) -> None:
    """Wait until the store has written what there was to write."""
    store = engine.core.kv.store
    assert store is not None
    until = time.monotonic() + SETTLE_S
    while not store.writes.idle:
        assert time.monotonic() < until, "the store does not end its writes"
        engine.waker.wait(0.1)
        engine.hear_store()


def check_cache_states(engine: LocalEngine, answers: Sequence[Answer], report: Report, name: str) -> None:
    """Cold, warm, after eviction of all windows, after eviction of everything; each prompt alone."""
    tree = engine.core.kv.tree
    for index, answer in enumerate(answers):
        salt = f"{name}/{index}"
        for state in ("cold", "warm", "windows evicted", "all evicted"):
            if state == "windows evicted":
                tree.evict_windows(tree.num_evictable_swa, 0)
            if state == "all evicted":
                engine.core.flush_cache()
                assert len(tree) == 0
            (got,), (cached,) = run(engine, [answer], salt=salt)
            report.compare(f"{name}, {state}", answer, got)
            if state == "warm":
                block_size = engine.core.kv.block_size
                assert cached == (len(answer.prompt) - 1) // block_size * block_size
            if state in ("cold", "all evicted"):
                assert cached == 0


def check_tiers(
    make: Callable[[], LocalEngine], answers: Sequence[Answer], report: Report, *, least: int, name: str
) -> None:
    """Cold, from the device, from the host, from the store, and from the store after a restart; each prompt alone.

    `make` gives an engine over the same store each time. Prompts of `least` tokens and more must be found where they
    are looked for.
    """
    engine = make()
    size = engine.core.kv.block_size

    def check(state: str, tier: str) -> None:
        for answer in answers:
            (got,), (last,) = run_to_end(engine, [answer])
            report.compare(f"{name}, {state}", answer, got)
            found = {"host": last.num_host_tokens, "store": last.num_store_tokens}
            found["device"] = last.num_cached_tokens - sum(found.values())
            whole = (len(answer.prompt) - 1) // size * size if tier else 0
            if len(answer.prompt) >= least:
                assert last.num_cached_tokens == whole, f"{name}, {state}: {last}"
                assert not tier or found[tier] == whole, f"{name}, {state}: {found} instead of {whole} from {tier}"

    check("cold", "")
    check("device", "device")
    engine.core.kv.tree.flush()
    check("host", "host")
    settle(engine)
    engine.flush_cache()
    check("store", "store")
    settle(engine)
    engine.close()
    engine = make()
    check("restarted", "store")
    engine.close()


def check_batch(engine: LocalEngine, answers: Sequence[Answer], report: Report, name: str) -> None:
    """All prompts at once, twice over, then again from the warm cache."""
    for state in ("cold batch", "warm batch"):
        for answer, got in zip([*answers, *answers], run(engine, [*answers, *answers])[0], strict=True):
            report.compare(f"{name}, {state}", answer, got)


def check_chunk_sizes(
    make: Callable[[int], LocalEngine], answers: Sequence[Answer], chunks: Sequence[int], report: Report
) -> None:
    """Each prompt alone, cold, with different prefill chunks."""
    for chunk in chunks:
        engine = make(chunk)
        for index, answer in enumerate(answers):
            (got,), _ = run(engine, [answer], salt=str(index))
            report.compare(f"chunks of {chunk}", answer, got)
