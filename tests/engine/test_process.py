"""The engine in its own process, with a tiny model: the client's contract, and what goes wrong at start."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from contracts.engine_client import CHECKS, Subject, collect, request, until
from cygnet.base.config import Config, resolve
from cygnet.base.errors import ConfigError, InvalidRequestError
from cygnet.base.messages import AddRequest
from cygnet.base.sampling import SamplingParams
from cygnet.engine.runtime.client import EngineProcess
from model import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-mimo")
    tiny.mimo().save_pretrained(path)
    return path


def config_for(folder: Path, *sets: str) -> Config:
    settings = ("kv.memory=8MiB", "kv.block_size=4", "kv.poison=true", "engine.audit=step", "engine.num_threads=1")
    # dtype is given: a tiny random model in bf16 is all ties, and equal text would prove nothing.
    return resolve(sets=[*settings, *sets], options={"model.model": str(folder), "model.dtype": "float32"}).config


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: object, folder: Path) -> None:
    @asynccontextmanager
    async def make(*, max_running: int = 8, max_waiting: int = 64) -> AsyncIterator[Subject]:
        sets = (f"engine.max_num_seqs={max_running}", f"engine.max_waiting={max_waiting}")
        client = await EngineProcess.start(config_for(folder, *sets))
        try:
            yield Subject(client, kill=lambda: os.kill(client.pid, signal.SIGKILL))
        finally:
            await client.aclose()

    asyncio.run(check(make))  # type: ignore[operator]


def test_start_reports_progress_and_itself(folder: Path) -> None:
    async def main() -> None:
        seen: list[tuple[str, int, int]] = []
        client = await EngineProcess.start(config_for(folder), on_progress=lambda *what: seen.append(what))
        try:
            assert ("finding the model", 0, 0) in seen
            assert seen[-1][1] == seen[-1][2] > 0
            assert client.ready.vocab_size == tiny.VOCAB
            assert client.ready.geometry.window == 12
            assert client.ready.max_model_len == 512
            assert client.stats.full.num_blocks > 0
        finally:
            await client.aclose()
        assert not psutil.pid_exists(client.pid)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["kv.memory=4096"], r"minimum of .* bytes"),
        (["model.max_model_len=400", "kv.memory=90000"], "--max-model-len"),
        (["kv.eviction=nope"], "unknown eviction policy 'nope'; known: lru, value"),
        (["kv.retention=['prompt_ned']"], "did you mean 'prompt_end'"),
        (["model.device=cuda:77"], "sees no GPU|--device cpu"),
        (["model.device=abacus"], "no torch device"),
    ],
)
def test_impossible_settings_are_refused_at_start(folder: Path, sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(EngineProcess.start(config_for(folder, *sets)))


def test_an_engine_error_reaches_the_caller(folder: Path) -> None:
    async def main() -> None:
        client = await EngineProcess.start(config_for(folder))
        try:
            with pytest.raises(InvalidRequestError, match="between 0 and 159"):
                await collect(client, AddRequest("bad", [1, 100_000], SamplingParams()))
            assert len((await collect(client, request("good", max_tokens=2)))[-1].token_ids) >= 1
            await until(lambda: client.stats.num_running == 0 and client.stats.generation_tokens_total == 2)
        finally:
            await client.aclose()

    asyncio.run(main())


def test_engine_ends_when_its_parent_is_killed(folder: Path) -> None:
    """No orphan keeps the memory: the engine notices the closed pipe."""
    program = f"""
import asyncio, msgspec
from cygnet.base.config import Config
from cygnet.engine.runtime.client import EngineProcess
async def main():
    client = await EngineProcess.start(msgspec.json.decode({_json(config_for(folder))!r}, type=Config))
    print(client.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        engine.wait(timeout=20)


def _json(config: Config) -> bytes:
    return msgspec.json.encode(config)
