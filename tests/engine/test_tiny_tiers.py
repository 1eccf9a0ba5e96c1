"""Tiny random models over three tiers: same tokens as transformers from every tier, whatever the store does."""

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.local import LocalEngine
from cygnet.kv.store import STORES, Outcome
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from model import tiny
from model.harness import FolderCheckpoint
from support.faulty_store import FaultyStore
from support.scenarios import Answer, Report, ask_oracle, check_tiers, engine_for, run, settle

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = ("kv.block_size=4", "engine.max_num_batched_tokens=64", "kv.store_wait=wait")

_stores: list[FaultyStore] = []
"""The store that the next engine opens, and those before."""


@STORES.register("faulty")
def _open(rest: str) -> FaultyStore:
    """A new store that holds what the last one held: the engine closes its own."""
    store = FaultyStore()
    if _stores:
        store._objects = _stores[-1]._objects
        store.before = _stores[-1].before
    _stores.append(store)
    return store


class Case:
    def __init__(self, family: str, folder: object) -> None:
        self.oracle = tiny.FAMILIES[family]()
        self.oracle.save_pretrained(folder)
        self.model: HybridModel = build_model(FolderCheckpoint(folder), dtype=torch.float32)  # type: ignore[arg-type]
        rnd = Random(family)
        trunk = [rnd.randrange(tiny.VOCAB) for _ in range(260)]
        prompts = [trunk[:n] for n in (5, 40, 90, 150, 260)]
        prompts += [
            [*trunk[:n], *[rnd.randrange(tiny.VOCAB) for _ in range(more)]] for n, more in ((60, 70), (150, 20))
        ]
        self.answers = [ask_oracle(self.oracle, prompt, 8) for prompt in prompts]

    def engine(self, *sets: str) -> LocalEngine:
        return engine_for(self.model, *BASE, *sets)


@pytest.fixture(scope="module", params=["mimo", "gemma3", "gpt_oss", "llama"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("mimo", tmp_path_factory.mktemp("mimo"))


def test_every_tier(case: Case, tmp_path: Path) -> None:
    """K and V dims and head counts of both groups differ in MiMo; Llama has one group only."""
    report = Report()
    longest = [case.answers[4]]
    sets = ("kv.memory=4MiB", "kv.host_cache=8MiB", f"kv.store={tmp_path}:64MiB")
    check_tiers(lambda: case.engine(*sets), longest, report, least=100, name="tiny")
    check_tiers(
        lambda: case.engine(*sets, "kv.store_wait=timeout"), case.answers, report, least=1000, name="with shared parts"
    )
    assert report.ties == []


def test_rebuild_from_the_host_and_from_the_store(case: Case) -> None:
    """Full KV from a lower tier, and no window anywhere."""
    geometry = case.model.description.kv_geometry(4)
    if not geometry.has_swa:
        pytest.skip("no sliding-window layers: no window to lose")
    _stores.clear()
    answer, report = case.answers[4], Report()
    engine = case.engine("kv.memory=4MiB", "kv.host_cache=8MiB", "kv.store=faulty:")
    run(engine, [answer])
    settle(engine)
    for key in [key for key in _stores[-1]._objects if key[16] == 1]:
        del _stores[-1]._objects[key]
    kv = engine.core.kv
    assert kv.host is not None
    for state in ("host", "store"):
        kv.tree.flush()
        kv.host.tree.evict_windows(kv.host.tree.num_evictable_swa, 0)
        if state == "store":
            engine.flush_cache()
        (got,), (cached,) = run(engine, [answer])
        report.compare(state, answer, got)
        full_hit = (len(answer.prompt) - 1) // 4 * 4
        assert cached == (full_hit - geometry.rebuild_tokens) // 4 * 4 > 0, state
        settle(engine)
        for key in [key for key in _stores[-1]._objects if key[16] == 1]:
            del _stores[-1]._objects[key]
    engine.close()
    assert report.ties == []


def test_a_store_that_returns_wrong_bytes(case: Case) -> None:
    """Every object is changed by one bit: nothing of it is used, and the objects are given up."""
    _stores.clear()
    answer, report = case.answers[4], Report()
    engine = case.engine("kv.memory=4MiB", "kv.host_cache=8MiB", "kv.store=faulty:")
    run(engine, [answer])
    settle(engine)
    for place, key in enumerate(list(_stores[-1]._objects)):
        _stores[-1].corrupt(key, 8 * place % 500)
    engine.flush_cache()
    (got,), (cached,) = run(engine, [answer])
    report.compare("wrong bytes", answer, got)
    assert cached == 0
    engine.close()
    assert report.ties == []


KINDS = ("ask", "ask", "ask", "step", "step", "abort", "evict", "flush", "flush host", "corrupt", "lose", "restart")
FAULTS = ("fail", "mend")
OPS = st.lists(st.tuples(st.sampled_from(KINDS + FAULTS), st.integers(0, 1 << 16)), min_size=5, max_size=30)


@pytest.mark.parametrize("write", ["through", "selective", "back"])
@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(ops=OPS, wait=st.sampled_from(["wait", "timeout", "best_effort"]))
def test_any_interleaving_gives_the_oracles_tokens(
    mimo: Case, write: str, ops: list[tuple[str, int]], wait: str
) -> None:
    """Tiny MiMo, poisoned and audited at every step, with room for little: evictions, aborts, restarts, failures."""
    _stores.clear()
    sets = ("kv.memory=520KiB", "kv.host_cache=700KiB", "kv.store=faulty:", "model.max_model_len=280")
    sets += (f"kv.write_policy={write}", f"kv.store_wait={wait}", "kv.store_timeout_ms=20")
    engine = mimo.engine(*sets)
    asked: dict[str, Answer] = {}
    tokens: dict[str, list[int]] = {}
    ended: dict[str, str] = {}

    def take(outputs: list) -> None:
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason

    def fail(name: str) -> None:
        if name in ("get", "put", "exists"):
            raise OSError("the medium is gone")

    for index, (what, number) in enumerate(ops):
        kv, store = engine.core.kv, _stores[-1]
        if what == "ask":
            name, answer = f"r{index}", mimo.answers[number % len(mimo.answers)]
            asked[name], tokens[name] = answer, []
            params = SamplingParams(temperature=0.0, max_tokens=len(answer.tokens), ignore_eos=True)
            engine.add(AddRequest(name, list(answer.prompt), params))
        elif what == "step":
            for _ in range(number % 12):
                take(engine.step())
        elif what == "abort" and asked:
            take(engine.abort([f"r{number % (index + 1)}"]))
        elif what == "evict":
            kv.tree.evict_windows(min(number % 20, kv.tree.num_evictable_swa), 0)
        elif what == "flush":
            engine.flush_cache()
        elif what == "flush host" and kv.host is not None:
            kv.host.flush()
        elif what == "corrupt" and store._objects:
            store.corrupt(sorted(store._objects)[number % len(store._objects)], number % 100)
        elif what == "lose" and store._objects:
            del store._objects[sorted(store._objects)[number % len(store._objects)]]
        elif what == "fail":
            store.before = fail
        elif what == "mend":
            store.before = lambda name: None
        elif what == "restart":
            take(engine.abort(list(asked)))
            engine.close()
            engine = mimo.engine(*sets)
    while engine.busy:
        take(engine.step())
    engine.close()
    assert ended.keys() == asked.keys()
    report = Report()
    for name, answer in asked.items():
        if ended[name] == "length":
            report.compare(name, answer, tokens[name])
        else:
            assert tokens[name] == list(answer.tokens[: len(tokens[name])])
    assert report.ties == []


def test_a_full_store_is_no_error(mimo: Case) -> None:
    """What it has no room for is computed again."""
    _stores.clear()
    engine = mimo.engine("kv.memory=4MiB", "kv.host_cache=8MiB", "kv.store=faulty:")
    _stores[-1].before = lambda name: None
    _stores[-1].answers["put"] = None
    run(engine, mimo.answers[:2])
    _stores[-1].answers.clear()
    engine.flush_cache()
    report = Report()
    for answer, got in zip(mimo.answers, run(engine, mimo.answers)[0], strict=True):
        report.compare("full", answer, got)
    engine.close()
    assert report.ties == []
    assert Outcome.OK in _stores[-1].stats().puts
