"""Every refusal: status, OpenAI's error object, the field named; a refused request costs the engine nothing."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from api.harness import MODEL, endless, events, fake_engine, in_loop, serving

ASK = [{"role": "user", "content": "hello"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """Check the format and return the message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    assert error["message"]
    return str(error["message"])


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"max_tokens": "x"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"min_tokens": 99}, "min_tokens"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x" * 2000]}, "stop"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 128, "prompt": ["a"] * 9}, "n"),
    ({"n": 1, "prompt": ["a"] * 1025}, "prompt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"cache_salt": "x" * 300}, "cache_salt"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*ASK, {"role": "user", "content": 5}]}, "messages[1].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
]


@in_loop
async def test_bad_fields_are_named() -> None:
    async with serving() as s:
        for fields, param in BAD_COMPLETIONS:
            assert_error(await s.complete(**fields), 400, param)
        for fields, param in BAD_CHATS:
            assert_error(await s.post(CHAT, {"model": MODEL, "messages": ASK, **fields}), 400, param)
        assert_error(await s.post(COMPLETIONS, {"model": MODEL}), 400, "prompt")
        assert s.engine.requests == []


@in_loop
async def test_bad_bodies() -> None:
    bodies: list[bytes] = [
        b"", b"{", b"[]", b"nonsense", b'{"prompt": "a"} x', b'{"prompt": "\xff"}', b'{"x":' + b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
    ]  # fmt: skip
    async with serving() as s:
        for body in bodies:
            response = await s.http.post(COMPLETIONS, content=body)
            assert_error(response, 400, None, "invalid_json")
        assert s.engine.requests == []


@in_loop
async def test_fields_switched_off_or_without_effect_are_accepted() -> None:
    async with serving() as s:
        response = await s.post(
            CHAT,
            {
                "messages": ASK, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "user": "u",
                "functions": None, "modalities": ["text"], "metadata": {"a": "b"}, "store": False,
                "service_tier": "auto", "parallel_tool_calls": True, "audio": None,
            },
        )  # fmt: skip
        assert response.status_code == 200
        assert "x-ignored-fields" not in response.headers


@in_loop
async def test_unknown_fields_are_accepted_and_named() -> None:
    async with serving() as s:
        response = await s.complete(max_token=3, zeta=1, **{"bad\r\nname": 1})
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "bad??name,max_token,zeta"
        streamed = await s.complete(zeta=1, stream=True)
        assert streamed.headers["x-ignored-fields"] == "zeta"
        answer = await s.openai.chat.completions.create(
            model=MODEL,
            messages=ASK,
            extra_body={"some_other_server": {"x": 1}},  # type: ignore[arg-type]
        )
        assert answer.choices[0].message.content == "hello world"


@in_loop
async def test_unknown_model_and_missing_template() -> None:
    async with serving(chat=False) as s:
        assert_error(await s.complete(model="gpt-9"), 404, "model", "model_not_found")
        assert_error(await s.http.get("/v1/models/gpt-9"), 404, "model")
        with pytest.raises(openai.NotFoundError):
            await s.openai.completions.create(model="gpt-9", prompt="x")
        message = assert_error(await s.post(CHAT, {"messages": ASK}), 400, "messages", "no_chat_template")
        assert "/v1/completions" in message
        response = await s.post(COMPLETIONS, {"prompt": "hello"})  # the name may be left out
        assert response.json()["model"] == MODEL


@in_loop
async def test_context_too_long_says_the_numbers() -> None:
    async with serving(fake_engine(endless, max_model_len=50)) as s:
        message = assert_error(await s.complete(prompt=[5] * 50), 400, "prompt", "context_length_exceeded")
        assert message.count("50") == 2
        message = assert_error(await s.complete(prompt=[5] * 30, max_tokens=21), 400, "max_tokens")
        assert all(number in message for number in ("30", "21", "51", "50"))
        assert (await s.complete(prompt=[5] * 30, max_tokens=20)).json()["usage"]["completion_tokens"] == 20
        long_chat = {"messages": [{"role": "user", "content": "z" * 90}]}
        assert_error(await s.post(CHAT, long_chat), 400, "messages", "context_length_exceeded")


@in_loop
async def test_body_limit() -> None:
    async with serving(max_body_bytes=2048) as s:
        announced = await s.http.post(COMPLETIONS, content=b"x" * 4096)
        assert "2048" in assert_error(announced, 413, None, "request_too_large")

        sent = 0

        async def endless_body() -> Any:
            nonlocal sent
            for _ in range(100_000):
                sent += 1024
                yield b" " * 1024

        # The server may close the connection while the client is still sending: that is a refusal as well.
        with contextlib.suppress(httpx.TransportError):
            assert_error(await s.http.post(COMPLETIONS, content=endless_body()), 413)
        assert sent < 100_000 * 1024
        fits = json.dumps({"prompt": "hello", "user": "x" * 1900}).encode()
        assert (await s.http.post(COMPLETIONS, content=fits)).status_code == 200
        assert_error(await s.http.post("/tokenize", content=b"x" * 4096), 413)
        assert len(s.engine.requests) == 1


@in_loop
async def test_queue_full() -> None:
    engine = fake_engine(endless, max_running=1, max_waiting=1, manual=True)
    async with serving(engine) as s:
        streams = []
        for _ in range(2):
            request = s.http.build_request("POST", COMPLETIONS, json={"prompt": "x", "stream": True, "max_tokens": 9})
            streams.append(s.http.send(request, stream=True))
        running = [asyncio.create_task(stream) for stream in streams]
        await engine.wait_added(2)
        for stream in (False, True):
            response = await s.complete(stream=stream)
            assert_error(response, 429, None, "queue_full")
            assert response.headers["retry-after"] == "7"
        with pytest.raises(openai.RateLimitError):
            await s.openai.completions.create(model=MODEL, prompt="x")
        engine.step(9)
        for task in running:
            response = await task
            assert response.status_code == 200
            engine.step(9)
            assert events((await response.aread()).decode())[-1] == "[DONE]"


@in_loop
async def test_one_refused_answer_cancels_its_siblings() -> None:
    engine = fake_engine(endless, max_running=1, max_waiting=2, manual=True)
    async with serving(engine) as s:
        other = asyncio.create_task(s.complete())
        await engine.wait_added(1)
        assert_error(await s.complete(n=3), 429)
        other.cancel()
        await engine.wait_idle()
        assert len(engine.aborted) == 3


@in_loop
async def test_unknown_paths_and_methods() -> None:
    async with serving() as s:
        assert_error(await s.http.get("/nowhere"), 404, None, "not_found")
        assert_error(await s.http.get("/v1/completions/"), 404)
        response = await s.http.get(COMPLETIONS)
        assert_error(response, 405, None, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        assert_error(await s.http.delete("/health"), 405)
        assert_error(await s.http.get("/static/../app.py"), 404)
        assert_error(await s.http.get("/static/%2e%2e/app.py"), 404)


@in_loop
async def test_api_key() -> None:
    async with serving(api_key="s3cret") as s:
        assert (await s.complete()).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            async with httpx.AsyncClient(base_url=s.url, trust_env=False) as other:
                for path in ("/v1/models", "/api/state", "/version", "/api/state/stream", "/cache", "/nowhere"):
                    response = await other.get(path, headers=headers)
                    assert_error(response, 401, None, "invalid_api_key")
                    assert response.headers["www-authenticate"] == "Bearer"
                assert_error(await other.post(COMPLETIONS, json={"prompt": "x"}, headers=headers), 401)
                assert_error(await other.post("/reset_prefix_cache", headers=headers), 401)
                for path in ("/", "/health", "/metrics", "/docs", "/openapi.json", "/static/app.js"):
                    assert (await other.get(path, headers=headers)).status_code == 200, path
        assert s.engine.flushes == 0
        assert (await s.openai.models.list()).data[0].id == MODEL


@in_loop
async def test_other_sites_pages_are_refused() -> None:
    async with serving(cors_origins=["https://friend.example"]) as s:
        foreign = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
        assert_error(await s.post("/reset_prefix_cache", None, **foreign), 403, None, "cross_site")
        assert s.engine.flushes == 0
        friend = {"sec-fetch-site": "cross-site", "origin": "https://friend.example"}
        response = await s.post("/reset_prefix_cache", None, **friend)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://friend.example"
        own = {"sec-fetch-site": "same-origin", "origin": s.url}
        assert (await s.post("/reset_prefix_cache", None, **own)).status_code == 200


@in_loop
async def test_dead_engine() -> None:
    async with serving() as s:
        assert (await s.http.get("/health")).status_code == 200
        s.engine.die()
        assert_error(await s.complete(), 503, None, "engine_unavailable")
        assert_error(await s.complete(stream=True), 503)
        response = await s.http.get("/health")
        assert response.status_code == 503
        with pytest.raises(openai.InternalServerError):
            await s.openai.completions.create(model=MODEL, prompt="x")


@in_loop
async def test_a_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object) -> list[int]:
        raise ValueError("the secret inside")

    async with serving(fake_engine(broken)) as s:
        message = assert_error(await s.complete(), 500, None, "internal")
        assert "secret" not in message
        assert any(record.exc_info and record.name == "cygnet.api" for record in caplog.records)


@in_loop
async def test_more_answers_than_the_server_ever_takes() -> None:
    """Not a 429, which would be tried again for ever."""
    async with serving(fake_engine(endless, max_running=2, max_waiting=3)) as s:
        message = assert_error(await s.complete(prompt=[5] * 3, n=6, max_tokens=1), 400, "n")
        assert "at most 5" in message
        assert_error(await s.complete(prompt=[[5], [6], [7]], n=2, max_tokens=1), 400, "prompt")
