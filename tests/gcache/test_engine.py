"""The engine with GCache as its store: prefixes are shared through it, and its death changes no answer."""

import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from cygnet.engine.runtime.local import LocalEngine
from cygnet.model.decoder import HybridModel
from cygnet.model.loader import build_model
from model import tiny
from model.harness import FolderCheckpoint
from support.gcache import ServerProcess, server_process
from support.scenarios import Answer, Report, ask_oracle, engine_for, run, settle

SETS = ("kv.block_size=4", "engine.max_num_batched_tokens=64", "kv.store_wait=wait", "kv.memory=4MiB")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[HybridModel, Answer]:
    folder: Path = tmp_path_factory.mktemp("mimo")
    oracle = tiny.FAMILIES["mimo"]()
    oracle.save_pretrained(folder)
    random = Random(3)
    answer = ask_oracle(oracle, [random.randrange(tiny.VOCAB) for _ in range(260)], 8)
    return build_model(FolderCheckpoint(folder), dtype=torch.float32), answer  # type: ignore[arg-type]


def engine(model: HybridModel, process: ServerProcess) -> LocalEngine:
    spec = f"gcache://127.0.0.1:{process.port}?timeout_s=10"
    return engine_for(model, *SETS, "kv.host_cache=8MiB", f"kv.store={spec}")


def test_a_second_engine_finds_what_the_first_computed(model: tuple[HybridModel, Answer]) -> None:
    """Also after the server was killed and started again, and rightly without it."""
    built, answer = model
    report = Report()
    with server_process() as process:
        first = engine(built, process)
        (got,), (cached,) = run(first, [answer])
        report.compare("computed", answer, got)
        assert cached == 0
        settle(first)
        first.close()

        process.signal(signal.SIGKILL)
        process.start()
        second = engine(built, process)
        (got,), (cached,) = run(second, [answer])
        report.compare("from the first engine's", answer, got)
        assert cached >= len(answer.prompt) // 2
        settle(second)

        second.flush_cache()
        process.signal(signal.SIGKILL)
        (got,), (cached,) = run(second, [answer])
        report.compare("without the server", answer, got)
        assert cached == 0
        second.close()
        process.start()
    assert report.ties == []
