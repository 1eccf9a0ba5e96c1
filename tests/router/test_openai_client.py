"""The `openai` client gets the same through the router as from the worker: Cygnet's own API over a fake engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from api.harness import MODEL, Running, serving
from router.harness import routing

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
