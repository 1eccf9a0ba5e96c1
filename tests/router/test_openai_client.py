"""The `openai` client gets the same through the router as from the worker: Cygnet's own API over a fake engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from api.harness import MODEL, Running, serving
from router.harness import routing
from router.mock_worker import MockWorker, Received, plain, raw

QUESTION: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Running, AsyncOpenAI]]:
    """A worker, and a client that reaches it through a router. The worker's own client is `worker.openai`."""
    async with serving() as worker, routing([], workers__urls=(worker.url,)) as router:
        async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0) as client:
            yield worker, client


def essence(answer: Any) -> Any:
    """What two runs of the same request have in common."""
    data = answer.model_dump()
    for volatile in ("id", "created", "system_fingerprint"):
        data.pop(volatile, None)
    (data.get("usage") or {}).pop("prompt_tokens_details", None)  # the second time more is cached
    return data


async def test_chat_and_completions() -> None:
    async with both() as (worker, client):
        for one in (worker.openai, client):
            assert (await one.chat.completions.create(**QUESTION)).choices[0].message.content
        assert essence(await client.chat.completions.create(**QUESTION)) == essence(
            await worker.openai.chat.completions.create(**QUESTION)
        )
        ask: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 5}
        assert essence(await client.completions.create(**ask)) == essence(await worker.openai.completions.create(**ask))


async def test_streams() -> None:
    async def said(client: AsyncOpenAI) -> tuple[str, list[Any], int]:
        """Text, reasons to finish, tokens. How the text is cut into events is a matter of time."""
        stream = await client.chat.completions.create(**QUESTION, stream=True, stream_options={"include_usage": True})
        events = [event async for event in stream]
        assert events[-1].usage is not None
        choices = [choice for event in events for choice in event.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        return text, [c.finish_reason for c in choices if c.finish_reason], events[-1].usage.total_tokens

    async with both() as (worker, client):
        ours = await said(client)
        assert ours == await said(worker.openai)
        assert ours[0] == "hello world"
        assert ours[2] > 0


async def test_models() -> None:
    async with both() as (worker, client):
        ours, theirs = await client.models.list(), await worker.openai.models.list()
        assert [card.model_dump() for card in ours.data] == [card.model_dump() for card in theirs.data]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors() -> None:
    async with both() as (worker, client):
        for one in (worker.openai, client):
            with pytest.raises(openai.BadRequestError) as caught:
                await one.chat.completions.create(**QUESTION, temperature=-1)
            assert "temperature" in str(caught.value)
            with pytest.raises(openai.NotFoundError):
                await one.chat.completions.create(**QUESTION | {"model": "other"})


async def test_logprobs_tools_and_several_choices() -> None:
    """Fields that only some requests have come back as they are."""
    asks: list[dict[str, Any]] = [
        QUESTION | {"n": 2, "logprobs": True, "top_logprobs": 2},
        QUESTION | {"stop": ["wor"], "seed": 7},
        QUESTION | {"response_format": {"type": "text"}, "user": "u", "max_completion_tokens": 3},
    ]
    async with both() as (worker, client):
        for ask in asks:
            ours = await client.chat.completions.create(**ask)
            assert essence(ours) == essence(await worker.openai.chat.completions.create(**ask))


async def test_what_workers_add_to_the_api() -> None:
    async with both() as (worker, client):
        for path, body in (
            ("/tokenize", {"model": MODEL, "prompt": "hello"}),
            ("/detokenize", {"model": MODEL, "tokens": [104, 105]}),
        ):
            root = str(client.base_url).removesuffix("/v1/")
            ours = await client.post(f"{root}{path}", body=body, cast_to=object)
            assert ours == (await worker.http.post(path, json=body)).json()


# What a foreign worker may serve besides, with answers in the form that the client expects.
USAGE = {"prompt_tokens": 2, "total_tokens": 2}
TEXT = {"type": "output_text", "text": "hi", "annotations": []}
MESSAGE = {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": [TEXT]}
RESPONSE = {"id": "r1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [MESSAGE]}
RESPONSE |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
DELTA = {
    "type": "response.output_text.delta",
    "delta": "h\u00e9",
    "item_id": "m1",
    "output_index": 0,
    "content_index": 0,
}
ANSWERS: dict[str, Any] = {
    "/v1/embeddings": {
        "object": "list",
        "model": "m",
        "usage": USAGE,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.25]}],
    },
    "/v1/responses": RESPONSE,
    "/v1/moderations": {"id": "x", "model": "m", "results": []},
    "/v1/images/generations": {"created": 1, "data": [{"b64_json": "aGk="}]},
    "/v1/audio/transcriptions": {"text": "said"},
    "/v1/audio/translations": {"text": "said"},
}


async def foreign(worker: MockWorker, request: Received, writer: asyncio.StreamWriter) -> None:
    kind = request.header("content-type") or ""
    if request.path == "/v1/audio/speech":
        await plain(body=bytes(range(256)), headers="")(worker, request, writer)
    elif "json" in kind and json.loads(request.body).get("stream"):
        events = [DELTA, {"type": "response.completed", "response": RESPONSE}]
        lines = b"".join(
            b"event: %b\ndata: %b\n\n"
            % (str(event["type"]).encode(), json.dumps(event | {"sequence_number": n}).encode())
            for n, event in enumerate(events)
        )
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        await raw(head + lines)(worker, request, writer)
    elif request.path in ANSWERS:
        await plain(body=json.dumps(ANSWERS[request.path]).encode())(worker, request, writer)
    else:
        await plain(404, b'{"error":{"message":"no such path","code":"not_found"}}')(worker, request, writer)


async def response_events(client: AsyncOpenAI) -> Any:
    return [event.model_dump() async for event in await client.responses.create(model="m", input="hello", stream=True)]


async def speech(client: AsyncOpenAI) -> bytes:
    return (await client.audio.speech.create(model="m", input="hello", voice="alloy")).content


Call = Callable[[AsyncOpenAI], Awaitable[Any]]
SOUND = ("a.wav", b"RIFF" + bytes(range(256)) * 40, "audio/wav")
CALLS: dict[str, Call] = {
    "embeddings": lambda c: c.embeddings.create(model="m", input=["hello"], encoding_format="float"),
    "responses": lambda c: c.responses.create(model="m", input="hello", instructions="short"),
    "responses, streamed": response_events,
    "moderations": lambda c: c.moderations.create(model="m", input="hello"),
    "images": lambda c: c.images.generate(model="m", prompt="a swan"),
    "transcriptions": lambda c: c.audio.transcriptions.create(model="m", file=SOUND),
    "translations": lambda c: c.audio.translations.create(model="m", file=SOUND),
    "speech": speech,
}


@pytest.mark.filterwarnings("ignore:deprecated")
@pytest.mark.parametrize("name", CALLS)
async def test_endpoints_that_other_engines_have(name: str) -> None:
    """JSON, multipart forms, binary answers: the same comes back, and the worker is sent the same."""
    async with MockWorker(behaviour=foreign) as worker, routing([worker]) as router:
        seen = []
        for url in (worker.url, router.url):
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                answer = await CALLS[name](client)
                seen.append(answer.model_dump() if hasattr(answer, "model_dump") else answer)
        assert seen[0] == seen[1]
        assert seen[0]
        direct, routed = worker.received
        assert direct.path == routed.path
        assert len(direct.body) == len(routed.body)
        if "json" in (direct.header("content-type") or ""):
            assert direct.body == routed.body


async def test_an_endpoint_that_the_worker_has_not() -> None:
    async with MockWorker(behaviour=foreign) as worker, routing([worker]) as router:
        for url in (worker.url, router.url):
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                with pytest.raises(openai.NotFoundError, match="no such path"):
                    await client.post("/rerank", body={"model": "m"}, cast_to=object)
