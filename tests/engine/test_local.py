"""LocalEngine's audits, and the runner's: what is checked when, and that a discrepancy is found."""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
import torch

from cygnet.base.config import resolve
from cygnet.base.errors import InvariantError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import RequestId
from cygnet.base.messages import AddRequest, EngineStats
from cygnet.base.sampling import SamplingParams
from cygnet.engine.core import EngineCore
from cygnet.engine.request import Request
from cygnet.engine.runtime.local import LocalEngine
from cygnet.engine.runtime.rows import Row, Rows
from cygnet.engine.runtime.setup import assemble
from cygnet.engine.scheduler import SchedulerPolicy
from cygnet.kv.manager import KVManager
from cygnet.kv.sizing import PoolSizes
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from model import tiny
from model.harness import FolderCheckpoint
from support.fake_runner import VOCAB, FakeRunner
from support.scenarios import engine_for

GEOMETRY = KVGeometry(GroupGeometry(2, 1, 4, 4, 2), GroupGeometry(3, 1, 4, 4, 2, window=6))


class CountingRunner(FakeRunner):
    audits = 0

    def audit(self, running: Mapping[RequestId, Request], gone: Collection[RequestId]) -> list[str]:
        self.audits += 1
        return super().audit(running, gone)


def local(audit: str) -> tuple[LocalEngine, CountingRunner]:
    core = EngineCore(
        KVManager(GEOMETRY, PoolSizes(4, 40, 20, 80)), SchedulerPolicy(), fingerprint="fake", vocab_size=VOCAB
    )
    runner = CountingRunner(GEOMETRY, 4)
    return LocalEngine(core, runner, audit=audit), runner


def test_an_idle_audit_never_holds_up_an_output() -> None:
    engine, runner = local("idle")
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert runner.audits == 0
    assert engine.wants_rest
    engine.rest()
    engine.rest()
    assert runner.audits == 1
    assert not engine.wants_rest


@pytest.mark.parametrize(("audit", "expected"), [("step", 3), ("off", 0)])
def test_audits_at_every_step_or_never(audit: str, expected: int) -> None:
    engine, runner = local(audit)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.rest()
    assert runner.audits == expected


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HybridModel:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.mimo().save_pretrained(folder)
    return build_model(FolderCheckpoint(folder), dtype=torch.float32)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(model: HybridModel) -> LocalEngine:
    return engine_for(model, "kv.block_size=4", "kv.memory=4MiB")


def test_an_eos_beyond_the_models_vocabulary_can_be_held_back(model: HybridModel) -> None:
    """Tokenizers have tokens that models have no logits for; `min_tokens` bans all that end a sequence."""
    config = resolve(sets=["kv.memory=4MiB", "engine.audit=step"]).config
    engine = assemble(config, model, name="test", eos_token_ids=[3, tiny.VOCAB + 5])
    (tokens,) = engine.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=4, min_tokens=3))
    assert len(tokens) >= 3


def test_statistics_count_what_the_store_has_moved(model: HybridModel, tmp_path: Path) -> None:
    """Bytes and seconds are counted where the store is called, and come with the engine's own numbers."""
    sets = (
        "kv.block_size=4", "kv.memory=4MiB", "kv.host_cache=4MiB", f"kv.store={tmp_path / 'store'}:64MiB",
        "kv.store_wait=wait", "kv.swa_share=0.5",
    )  # fmt: skip
    random = Random(5)
    prompt = [random.randrange(tiny.VOCAB) for _ in range(90)]

    def run() -> EngineStats:
        engine = engine_for(model, *sets)
        try:
            engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
            for _ in range(100):
                engine.hear_store()
                if not engine.stats().store_waiting_puts + engine.stats().store_queued_writes:
                    break
                engine.waker.wait(1.0)
            return engine.stats()
        finally:
            engine.close()

    first, second = run(), run()
    assert first.store_stored_objects_total > 0 == first.store_fetched_objects_total
    assert first.store_written_bytes_total >= first.store_stored_objects_total * 512
    assert first.store_put_seconds_total > 0 == first.store_read_bytes_total
    assert second.store_hit_tokens_total > 0
    assert second.store_read_bytes_total >= second.store_fetched_objects_total * 512 > 0
    assert second.store_fetch_seconds_total > 0
    assert second.store_hung_calls == 0


def change_token(rows: Rows, row: Row) -> None:
    row.tokens[3] += 1


def change_last(rows: Rows, row: Row) -> None:
    rows.last[row.line] += 1


def change_number(rows: Rows, row: Row) -> None:
    rows.num_tokens[row.line] += 1


def change_full(rows: Rows, row: Row) -> None:
    rows.full[row.line, 1] += 1


def change_swa(rows: Rows, row: Row) -> None:
    rows.swa[row.line, rows.num_tokens[row.line] // 4] += 1


def change_floor(rows: Rows, row: Row) -> None:
    rows.key_floor[row.line] += 1


def change_cached(rows: Rows, row: Row) -> None:
    rows.write_full_from[row.line] += 4


def change_counts(rows: Rows, row: Row) -> None:
    row.sampling.append(7)


def take_a_line(rows: Rows, row: Row) -> None:
    rows._free.append(row.line)


CHANGES = [
    (change_token, "another tokens"),
    (change_last, "another last token"),
    (change_number, "another number of tokens"),
    (change_full, "another full block table"),
    (change_swa, "another SWA block table"),
    (change_floor, "another key floor"),
    (change_cached, "another cached prefix"),
    (change_counts, "another output counts"),
    (take_a_line, "1 used and 64 free lines"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_row_that_differs_is_found(model: HybridModel, change: Callable[[Rows, Row], None], words: str) -> None:
    engine = engine_for(model, "kv.block_size=4", "kv.memory=4MiB")
    name = RequestId(change.__name__)
    prompt = [Random(name).randrange(tiny.VOCAB) for _ in range(50)]
    engine.add(AddRequest(name, prompt, SamplingParams(max_tokens=40, ignore_eos=True, frequency_penalty=0.1)))
    for _ in range(5):
        engine.step()
    engine.check()
    rows = engine._runner._rows  # type: ignore[attr-defined]
    change(rows, rows[name])
    with pytest.raises(InvariantError, match=words):
        engine.check()


def test_a_row_too_many_and_one_too_few_are_found(engine: LocalEngine) -> None:
    engine.add(AddRequest("row", [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    rows = engine._runner._rows._rows  # type: ignore[attr-defined]
    rows[RequestId("other")] = rows.pop(RequestId("row"))
    with pytest.raises(InvariantError, match=r"(?s)row of other, which does not run.*no row of row"):
        engine.check()
    engine.abort(["row"])
