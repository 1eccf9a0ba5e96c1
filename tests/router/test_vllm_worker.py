"""A real vLLM behind the router, where `python benchmarks/peers.py vllm models` has installed it: the same answers as
without a router, its metrics and its cancellation.
"""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from router.harness import Client, Router, routing
from router.redis_process import free_port

PEERS = Path(__file__).parent.parent.parent / ".peers"
PYTHON, MODEL = PEERS / "vllm" / "bin" / "python", PEERS / "models" / "gemma3-270m"
START_S = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.exists() and MODEL.exists()), reason="needs vLLM: python benchmarks/peers.py vllm models"
    ),
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "log"
    # Not `vllm serve`, which asks for metadata that an installation from its parts does not have.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
    command += ["--served-model-name", "gemma"]
    command += ["--host", "127.0.0.1", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "8"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)  # between attempts, not for the outcome
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@asynccontextmanager
async def both(url: str) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI, Router]]:
    """A client of vLLM's own and one through a router."""
    async with routing([], workers__urls=(url,)) as router:
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=50) as direct,
            AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0, timeout=50) as routed,
        ):
            yield direct, routed, router


def essence(answer: Any) -> Any:
    """What two runs of a greedy request have in common."""
    data = answer.model_dump()
    for volatile in ("id", "created", "usage", "created_at", "completed_at"):
        data.pop(volatile, None)
    for item in data.get("output", []):
        item.pop("id", None)
    return data


ASK: dict[str, Any] = {"model": "gemma", "temperature": 0, "max_tokens": 6}


async def test_its_card_passes(vllm: str) -> None:
    async with both(vllm) as (direct, routed, _):
        ours, theirs = (await routed.models.list()).data, (await direct.models.list()).data
        cards = [{k: v for k, v in card.model_dump().items() if k not in ("created", "permission")} for card in ours]
        assert cards == [
            {k: v for k, v in card.model_dump().items() if k not in ("created", "permission")} for card in theirs
        ]
        assert cards[0]["max_model_len"] == 2048


async def test_the_same_answers(vllm: str) -> None:
    ask: dict[str, Any] = {**ASK, "prompt": "One, two, three,", "logprobs": 2, "extra_body": {"top_k": 1}}
    async with both(vllm) as (direct, routed, _):
        assert essence(await routed.completions.create(**ask)) == essence(await direct.completions.create(**ask))


async def test_the_same_refusals(vllm: str) -> None:
    async with both(vllm) as (direct, routed, _):
        for client in (direct, routed):
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**ASK | {"temperature": -1}, prompt="a")
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(**ASK | {"model": "other"}, prompt="a")


async def test_a_caller_who_leaves_stops_it(vllm: str) -> None:
    async def running() -> float:
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            text = (await http.get(f"{vllm}/metrics")).text
        return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))

    async with both(vllm) as (_, _routed, router):
        body = b'{"model":"gemma","prompt":"count","max_tokens":1900,"ignore_eos":true,"stream":true}'
        async with Client(router.port) as client:
            await client.send(body, path="/v1/completions")
            await client.reader.readuntil(b"data: ")
            assert await running() == 1
        async with asyncio.timeout(20):
            while await running():
                await asyncio.sleep(0.1)
