"""The load itself: sessions carried out in a closed loop (so many at once) or an open one (each at its time)."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from cygnet.cli.bench.client import BenchError, Client, Prompt, Result
from cygnet.cli.bench.workload import FIRST_TOKEN, TokenSource
from cygnet.sim.sessions import Session, Turn

Progress = Callable[[Result], None]


class Form(msgspec.Struct, frozen=True):
    """How prompts are put to this server: as token ids, as text or as chat messages."""

    kind: str
    answers_tokenized: bool = False
    """The server's `/tokenize` turns an answer into tokens, so that a session of token ids can grow by it."""


async def probe(client: Client, *, growing: bool) -> Form:
    """Ask one short request to learn what the server takes; also its warm-up. Raises `BenchError` when it refuses."""
    if client.endpoint == "chat":
        result = await client.send([{"role": "user", "content": "Hello"}], 1)
        form = Form("chat")
    else:
        result = await client.send([FIRST_TOKEN + i for i in range(8)], 1)
        form = Form("tokens")
        if result.error in ("HTTP 400", "HTTP 422"):
            result, form = await client.send("Hello", 1), Form("text")
    if result.error:
        raise BenchError(f"the server refuses a test request: {result.error}: {result.error_detail}")
    if form.kind == "tokens" and growing:
        tokenized = await client.tokenize("Hello") is not None
        form = Form("tokens", answers_tokenized=True) if tokenized else Form("text")
    return form


async def run_sessions(
    client: Client,
    sessions: Sequence[Session],
    tokens: TokenSource,
    form: Form,
    *,
    concurrency: int | None,
    progress: Progress,
) -> tuple[list[Result], float]:
    """Carry out all sessions; returns every request's result and the seconds it took.

    Sessions with an arrival time start then (or later, where `concurrency` holds them back); the others start as soon
    as one of the `concurrency` places is free. A failed turn ends its session.
    """
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        progress(result)

    places = asyncio.Semaphore(concurrency or len(sessions))
    start = time.perf_counter()

    async def carry_out(session: Session) -> None:
        try:
            await _run_session(client, session, tokens, form, note)
        finally:
            places.release()

    async with asyncio.TaskGroup() as group:
        for session in sessions:
            if session.arrival_s is not None:
                await asyncio.sleep(max(0.0, start + session.arrival_s - time.perf_counter()))
            await places.acquire()
            group.create_task(carry_out(session))
    return results, time.perf_counter() - start


async def _run_session(client: Client, session: Session, tokens: TokenSource, form: Form, note: Progress) -> None:
    history: Prompt = "" if form.kind == "text" else []
    for number, turn in enumerate(session.turns):
        if number and turn.delay_s:
            await asyncio.sleep(turn.delay_s)
        prompt = _prompt(turn, tokens, form)
        if session.growing:
            history = prompt = history + prompt  # type: ignore[operator]  # both are of the form's kind
        result = await client.send(prompt, turn.output_len)
        note(result)
        if result.error:
            return
        if session.growing and number + 1 < len(session.turns):
            history = history + await _answer(client, result, form)  # type: ignore[operator]
        result.text, result.token_ids = "", None  # a long run keeps numbers, not texts


def _prompt(turn: Turn, tokens: TokenSource, form: Form) -> Prompt:
    """The turn's own part of the prompt, in the server's form. A trace's text is always sent as text."""
    if form.kind == "tokens" and turn.text is None:
        return tokens.token_ids(turn.pieces)
    text = turn.text if turn.text is not None else tokens.text(turn.pieces)
    return [{"role": "user", "content": text}] if form.kind == "chat" else text


async def _answer(client: Client, result: Result, form: Form) -> Prompt:
    """The answer as the next turn's prompt repeats it."""
    if form.kind == "chat":
        return [{"role": "assistant", "content": result.text}]
    if form.kind == "text":
        return result.text
    return result.token_ids or await client.tokenize(result.text) or []
