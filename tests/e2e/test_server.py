"""`cygnet serve` as a user runs it, with a tiny model; the engine audits its bookkeeping at every step."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import psutil
import pytest

from cygnet.cli.banner import READY_WORDS
from cygnet.cli.child import ChildServer
from support import tiny_folder

TIMEOUT_S = 60.0
SETS = (
    "kv.memory=700KiB",
    "kv.block_size=4",
    "kv.poison=true",
    "engine.audit=step",
    "engine.num_threads=1",
    "engine.max_num_batched_tokens=64",
    "engine.max_num_seqs=12",
    "model.dtype=float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with ChildServer(str(folder), SETS) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture
def name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


async def state(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/api/state")).raise_for_status().json()


async def idle_state(http: httpx.AsyncClient) -> dict[str, Any]:
    """The state once nothing runs or waits, and the engine has said so."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            seen = await state(http)
            stats = seen["stats"]
            if seen["in_flight"] == stats["num_running"] == stats["num_waiting"] == 0 == stats["full"]["used"]:
                return seen
            await asyncio.sleep(0.05)


def assert_pools_equal_the_tree(stats: dict[str, Any]) -> None:
    """All that is not free is in the tree."""
    for pool in ("full", "swa"):
        assert stats[pool]["used"] == 0
        assert stats[pool]["free"] + stats[pool]["cached"] == stats[pool]["num_blocks"]
    assert stats["full"]["cached"] == stats["tree_blocks"]


def test_200_requests_with_aborts_and_disconnects(url: str) -> None:
    """Mixed lengths and shared prefixes; a third of the clients leave: before the first byte, in the middle, or without
    streaming. The engine audits itself at every step, and would die of a discrepancy."""
    rnd = Random(5)
    shared = [[rnd.randrange(256) for _ in range(300)] for _ in range(3)]

    def prompt() -> list[int]:
        kept = rnd.choice(shared)[: rnd.choice([0, 40, 150, 300])]
        return kept + [rnd.randrange(256) for _ in range(rnd.randint(1, 120))]

    async def one(http: httpx.AsyncClient, body: dict[str, Any], leave: str) -> str:
        if leave == "before the first byte" or (leave == "in the middle" and not body["stream"]):
            try:
                await http.post("/v1/completions", json=body, timeout=httpx.Timeout(TIMEOUT_S, read=0.03))
            except httpx.ReadTimeout:
                return "left"
            return "served"
        if not body["stream"]:
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == body["max_tokens"]
            return "served"
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            events = 0
            async for line in response.aiter_lines():
                events += line.startswith("data: {")
                if leave == "in the middle" and events >= 3:
                    return "left"
            assert line == "" or line == "data: [DONE]"
        return "served"

    async def main() -> None:
        limit = asyncio.Semaphore(24)
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:

            async def bounded(index: int) -> str:
                body = {
                    "model": (await http.get("/v1/models")).json()["data"][0]["id"],
                    "prompt": prompt(),
                    "max_tokens": rnd.randint(1, 60),
                    "temperature": rnd.choice([0.0, 0.8]),
                    "ignore_eos": True,
                    "stream": rnd.random() < 0.6,
                }
                leave = rnd.choice(["", "", "", "", "before the first byte", "in the middle"])
                async with limit:
                    return await one(http, body, leave)

            outcomes = await asyncio.gather(*(bounded(i) for i in range(200)))
            assert outcomes.count("left") >= 10
            assert outcomes.count("served") >= 100
            stats = (await idle_state(http))["stats"]
            assert_pools_equal_the_tree(stats)
            assert stats["effective_hit_tokens_total"] > 0
            (await http.post("/reset_prefix_cache")).raise_for_status()
            async with asyncio.timeout(TIMEOUT_S):
                while (stats := (await idle_state(http))["stats"])["tree_blocks"]:
                    await asyncio.sleep(0.05)
            assert stats["full"]["free"] == stats["full"]["num_blocks"]
            assert stats["swa"]["free"] == stats["swa"]["num_blocks"]
            assert (await http.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_disconnect_ends_the_request_in_the_engine(url: str, name: str) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
            before = (await idle_state(http))["stats"]["generation_tokens_total"]
            body = {"model": name, "prompt": [7] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    break
            after = (await idle_state(http))["stats"]["generation_tokens_total"]
            assert after - before < 900

    asyncio.run(main())


def test_chat_and_usage(client: openai.OpenAI, name: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me something long enough to fill a few blocks."}]
    first = client.chat.completions.create(model=name, messages=messages, max_tokens=20, temperature=0)
    again = client.chat.completions.create(model=name, messages=messages, max_tokens=20, temperature=0)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.usage is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= again.usage.prompt_tokens - 5
    assert first.choices[0].finish_reason in ("stop", "length")


def test_streamed_text_is_the_whole_text(client: openai.OpenAI, name: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "héllo wörld"}]
    settings: dict[str, Any] = {"model": name, "messages": messages, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    pieces, usage = [], None
    for event in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        pieces += [choice.delta.content or "" for choice in event.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_n_and_seeds(client: openai.OpenAI, name: str) -> None:
    settings: dict[str, Any] = {"model": name, "prompt": "abc", "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**settings, n=3, seed=4, logprobs=3)
    assert len({choice.text for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 6
        assert all(p is not None and p <= 0 for p in choice.logprobs.token_logprobs)
    again = client.completions.create(**settings, n=3, seed=4, logprobs=3)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]


def test_stop_strings(client: openai.OpenAI, name: str) -> None:
    settings: dict[str, Any] = {"model": name, "prompt": "xyz", "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**settings, max_tokens=40).choices[0].text
    stop = text[10:13]
    stopped = client.completions.create(**settings, max_tokens=40, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages"),
        ({"n": 0}, 400, "n"),
    ],
)
def test_errors_name_the_field(client: openai.OpenAI, name: str, change: dict, status: int, param: str) -> None:
    body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**body)
    assert caught.value.status_code == status
    assert caught.value.param == param  # type: ignore[attr-defined]


def test_32_concurrent_streams(url: str, name: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one(index: int) -> str:
                stream = await client.completions.create(
                    model=name, prompt=f"prompt {index % 8}", max_tokens=24, temperature=0, stream=True
                )
                return "".join([event.choices[0].text async for event in stream if event.choices])

            texts = await asyncio.gather(*(one(i) for i in range(32)))
            assert all(texts[i] == texts[i % 8] for i in range(32))

    asyncio.run(main())


def test_metrics_add_up(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        text = http.get("/metrics").text
        stats = http.get("/api/state").json()["stats"]
    values = {
        line.split(" ")[0].split("{")[0]: float(line.split(" ")[-1]) for line in text.splitlines() if line[0] != "#"
    }
    assert values["vllm:prompt_tokens_total"] == stats["prompt_tokens_total"] > 0
    assert values["vllm:prefix_cache_hits_total"] == stats["effective_hit_tokens_total"]
    assert values["vllm:request_queue_time_seconds_count"] > 0
    full, safe, effective = (stats[f"{kind}_hit_tokens_total"] for kind in ("full", "window_safe", "effective"))
    assert full >= effective >= 0
    assert full >= safe


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "cygnet.cli.main", "serve", str(folder), "--port", "0", *options]
    for item in SETS:
        command += ["--set", item]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = next(line for line in process.stdout if READY_WORDS in line)
    return process, line.split()[-1]


def test_sigterm_lets_a_running_stream_finish(folder: Path) -> None:
    process, url = start(folder)
    with process, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        body = {"prompt": [5] * 9, "max_tokens": 300, "ignore_eos": True, "stream": True}
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(timeout=TIMEOUT_S) == 0


def test_a_dead_engine_ends_streams_and_the_server(folder: Path) -> None:
    process, url = start(folder)
    with process, httpx.Client(base_url=url, timeout=TIMEOUT_S) as http:
        (engine,) = [
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if "cygnet.engine.runtime.process" in p.cmdline()
        ]
        body = {"prompt": [5] * 9, "max_tokens": 900, "ignore_eos": True, "stream": True}
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine.pid, signal.SIGKILL)
            rest = [line for line in lines if line.startswith("data: ")]
        assert any('"error"' in line for line in rest)
        assert process.wait(timeout=TIMEOUT_S) == 1
