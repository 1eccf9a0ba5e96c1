"""`cygnet serve --host-cache --store` as a user runs it: answers stay the same over restarts, kill -9 and sharing."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from cygnet.cli.child import ChildServer
from support import tiny_folder

TIMEOUT_S = 60.0
SETS = (
    "kv.memory=1MiB",
    "kv.host_cache=4MiB",
    "kv.block_size=4",
    "kv.poison=true",
    "kv.store_wait=wait",
    "engine.audit=step",
    "engine.num_threads=1",
    "engine.max_num_batched_tokens=64",
    "model.dtype=float32",
)
RANDOM = Random(11)
PROMPTS = [[RANDOM.randrange(3, 90) for _ in range(length)] for length in range(90, 190, 10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


def ask(url: str, prompt: list[int]) -> tuple[str, int]:
    """Greedy text, and how many tokens of the prompt were cached."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[str]:
    """What a server without lower tiers says."""
    sets = [item for item in SETS if not item.startswith(("kv.host_cache", "kv.store"))]
    with ChildServer(str(folder), sets) as server:
        return [ask(server.url, prompt)[0] for prompt in PROMPTS]


def test_a_session_comes_back_after_a_restart(folder: Path, wanted: list[str], tmp_path: Path) -> None:
    sets = (*SETS, f"kv.store={tmp_path}:64MiB")
    with ChildServer(str(folder), sets) as server:
        assert [ask(server.url, prompt) for prompt in PROMPTS] == [(text, 0) for text in wanted]
    with ChildServer(str(folder), sets) as server:
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            assert ask(server.url, prompt) == (text, (len(prompt) - 1) // 4 * 4)


def test_kill_9_in_the_middle_of_writes(folder: Path, wanted: list[str], tmp_path: Path) -> None:
    """Whatever was written by then: right answers, and in the end everything from the store."""
    sets = (*SETS, f"kv.store={tmp_path}:64MiB")
    for round_ in range(2):
        with ChildServer(str(folder), sets) as server, ThreadPoolExecutor(len(PROMPTS)) as threads:
            asked = [threads.submit(ask, server.url, prompt) for prompt in PROMPTS]
            for future, text in list(zip(asked, wanted, strict=True))[: 3 * round_ + 1]:
                assert future.result()[0] == text
            for process in psutil.Process(os.getpid()).children(recursive=True):
                with suppress(psutil.Error):  # it ends by itself when the other one does
                    if "cygnet" in " ".join(process.cmdline()):
                        process.send_signal(signal.SIGKILL)
            for future in asked:
                future.exception()
    with ChildServer(str(folder), sets) as server:
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            assert ask(server.url, prompt)[0] == text
    with ChildServer(str(folder), sets) as server:
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            assert ask(server.url, prompt) == (text, (len(prompt) - 1) // 4 * 4)


def test_two_servers_share_a_store(folder: Path, wanted: list[str], tmp_path: Path) -> None:
    sets = (*SETS, f"kv.store={tmp_path}:64MiB", "kv.store_timeout_ms=5000")
    with ChildServer(str(folder), sets) as writer:
        for prompt in PROMPTS:
            ask(writer.url, prompt)
        with ChildServer(str(folder), sets) as reader:
            cached = []
            for prompt, text in zip(PROMPTS, wanted, strict=True):
                got, hit = ask(reader.url, prompt)
                assert got == text
                cached.append(hit)
    assert any(cached)
