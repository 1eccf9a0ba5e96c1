"""`cygnet up --gcache --redis` as a user runs it: servers share their KV through GCache, die and come back."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from cygnet.cli.fleet import cygnet_command
from support import tiny_folder

pytestmark = pytest.mark.slow

LIMIT_S = 900
SETS = (
    "kv.memory=1MiB",
    "kv.host_cache=1MiB",
    "kv.block_size=4",
    "kv.store_wait=wait",
    "kv.store_timeout_ms=5000",
    "engine.num_threads=1",
    "model.dtype=float32",
)
RANDOM = Random(5)
PROMPTS = [[RANDOM.randrange(3, 90) for _ in range(160)] for _ in range(6)]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


class FleetProcess:
    """A fleet that has said it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log
        self.url = self.page = self.model = ""

    async def said(self, pattern: str) -> str:
        """First group of `pattern`, once the log has it."""
        async with asyncio.timeout(LIMIT_S):
            while not (found := re.search(pattern, self._log.read_text() if self._log.exists() else "")):
                assert self.process.returncode is None, self._log.read_text()
                await asyncio.sleep(0.1)
        return found[1]

    async def parts(self) -> dict[str, dict[str, Any]]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            return {part["name"]: part for part in (await http.get(f"{self.page}/status")).json()["parts"]}

    async def ask(self, prompt: list[int], url: str = "") -> tuple[str, int]:
        """Greedy text, and how many tokens of the prompt were cached; of the router, or of the server at `url`."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url or self.url, timeout=60, trust_env=False) as http:
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def until_ready(self, name: str, restarts: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (part := (await self.parts())[name])["state"] != "ready" or part["restarts"] < restarts:
                await asyncio.sleep(0.1)


@asynccontextmanager
async def fleet(folder: Path, *args: str) -> AsyncIterator[FleetProcess]:
    log = folder / "log"
    command = cygnet_command("up", str(tiny_folder.write(folder / "tiny")), "--workers", "2", "--log", str(log))
    for item in SETS:
        command += ["--set", item]
    process = await asyncio.create_subprocess_exec(*command, "--port", "0", "--status-port", "0", *args)
    running = FleetProcess(process, log)
    try:
        running.page = await running.said(r"status page: (http://\S+)")
        running.url = await running.said(r"ready: (http://\S+)/v1")
        async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as http:
            running.model = (await http.get("/v1/models")).json()["data"][0]["id"]
        yield running
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def browse(url: str, folder: Path) -> str:
    """The page as Chromium has it after loading, and a picture of it in `folder`."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    subprocess.run(
        [*command, f"--screenshot={folder / 'page.png'}", "--window-size=1100,500", url],
        check=True,
        capture_output=True,
        timeout=600,
    )
    assert (folder / "page.png").stat().st_size > 5000
    return subprocess.run([*command, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=600).stdout


def test_servers_share_kv_and_survive_each_other(tmp_path: Path) -> None:
    """What one server computed the other one finds in GCache; a killed one comes back and finds it too."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    asyncio.run(share_and_survive(tmp_path))


async def share_and_survive(tmp_path: Path) -> None:
    async with fleet(tmp_path, "--gcache", "64MiB", "--redis") as running:
        parts = await running.parts()
        assert list(parts) == ["redis", "gcache", "worker-1", "worker-2", "router"]
        assert {part["state"] for part in parts.values()} == {"ready"}
        one, two = parts["worker-1"]["url"], parts["worker-2"]["url"]

        cold = [await running.ask(prompt, one) for prompt in PROMPTS]
        assert {cached for _, cached in cold} == {0}
        shared = [await running.ask(prompt, two) for prompt in PROMPTS]
        assert [text for text, _ in shared] == [text for text, _ in cold]
        assert any(cached for _, cached in shared), "the other server found nothing of it"

        text, _ = await running.ask(PROMPTS[0])
        assert text == cold[0][0]
        os.kill(parts["worker-1"]["pid"], signal.SIGKILL)
        for prompt, (text, _) in zip(PROMPTS, cold, strict=True):
            assert (await running.ask(prompt))[0] == text, "the router's callers saw a server's death"
        await running.until_ready("worker-1", 1)
        parts = await running.parts()
        assert parts["worker-1"]["url"] == one
        again = [await running.ask(prompt, one) for prompt in PROMPTS]
        assert [text for text, _ in again] == [text for text, _ in cold]
        assert any(cached for _, cached in again), "it has lost its memory, not the shared one"

        for name in ("redis", "gcache"):  # what is shared may die too: a miss, or a decision made alone
            os.kill((await running.parts())[name]["pid"], signal.SIGKILL)
            assert (await running.ask(PROMPTS[1]))[0] == cold[1][0]
            await running.until_ready(name, 1)
        assert (await running.ask(PROMPTS[2]))[0] == cold[2][0]

        if CHROMIUM:
            dom = await asyncio.to_thread(browse, running.page, tmp_path)
            for name, part in (await running.parts()).items():
                assert re.search(rf"<td>{name}</td><td class=\"ready\">ready</td>.*{re.escape(part['url'])}", dom), dom
    for part in parts.values():
        with pytest.raises(ProcessLookupError):
            os.kill(part["pid"], 0)
