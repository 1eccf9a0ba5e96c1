"""Requests of public traces, as chains of blocks that requests share. Standard library only: peers' workers use it.

Traces name prompts by blocks of 512 tokens (`TRACE_BLOCK`). Here every such block gets a number that stands for all
tokens up to its end, so that equal numbers mean equal prefixes, and is cut into the smaller blocks of the caches.

Traces don't say what the tokens of an output are, nor of the prompt's last, partial block. They are in the prompt of
the request that goes on from there, if one does: the next that begins with all whole blocks of this prompt, and is no
shorter than this prompt and output. Where none does, they are tokens that nobody else has.
"""

import gzip
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

TRACE_BLOCK = 512
SHARED = Path(__file__).parent.parent.parent / "shared" / "traces"
SAMPLES = Path(__file__).parent / "data"
AGENTIC, MOONCAKE = "agentic", "mooncake"
FILES = {AGENTIC: "agentic/sessions_512.jsonl.gz", MOONCAKE: "mooncake/conversation_trace.jsonl.gz"}
MEAN_START_GAP_S = 100.0
"""Between the starts of agentic sessions: about 80 live at a time."""
STEP_S, TOKEN_S = 1.0, 0.02
"""A request holds its KV for a second and 20 ms for each token of its output."""


@dataclass(slots=True)
class Request:
    """One request. `chain`: blocks of 512 tokens of prompt and output, the last one partial perhaps."""

    index: int
    start_s: float
    prompt_tokens: int
    output_tokens: int
    chain: "array[int]"
    duration_s: float = 0.0
    message_starts: list[int] = field(default_factory=list)
    """Tokens at which a message is known to begin: behind the system prompt, an earlier prompt, its response."""

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def blocks(self, block_size: int) -> list[int]:
        """Numbers of all whole blocks of `block_size` tokens, which must divide 512."""
        parts = TRACE_BLOCK // block_size
        numbers = [block * parts + part for block in self.chain for part in range(parts)]
        del numbers[self.num_tokens // block_size :]
        return numbers


def find(name: str) -> Path:
    """The trace's file: whole where it is there, else the repository's sample."""
    whole = SHARED / FILES[name]
    return whole if whole.exists() else SAMPLES / Path(FILES[name]).name


def load(name: str, limit: int = 0, seed: int = 0) -> list[Request]:
    """The trace's first `limit` sessions (agentic) or requests (mooncake), 0 for all, in order of their starts."""
    with gzip.open(find(name), "rt") as file:
        lines = [json.loads(line) for number, line in enumerate(file) if not limit or number < limit]
    requests = _agentic(lines, seed) if name == AGENTIC else _mooncake(lines)
    requests.sort(key=lambda request: request.start_s)
    for index, request in enumerate(requests):
        request.index = index
    _continue(requests)
    return requests


class _Numbers:
    """Numbers of blocks: one for each name behind each prefix."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, object], int] = {}

    def chain(self, names: Iterable[object]) -> "array[int]":
        found, parent = array("q"), -1
        for name in names:
            parent = self._known.setdefault((parent, name), len(self._known))
            found.append(parent)
        return found


def _mooncake(lines: list[dict[str, Any]]) -> list[Request]:
    numbers = _Numbers()
    return [
        Request(
            0,
            line["timestamp"] / 1000,
            line["input_length"],
            line["output_length"],
            numbers.chain(line["hash_ids"][: line["input_length"] // TRACE_BLOCK]),
        )
        for line in lines
    ]


def _agentic(lines: list[dict[str, Any]], seed: int) -> list[Request]:
    """Sessions whose starts are a Poisson process. Those with equal tools share them, and so with the system prompt."""
    numbers, random, start, requests = _Numbers(), Random(seed), 0.0, []
    for number, line in enumerate(lines):
        start += random.expovariate(1 / MEAN_START_GAP_S)
        tools, system = line["tool_tokens"], line["tool_tokens"] + line["system_tokens"]
        names: list[int] = []
        first: list[int] = []
        for at, prompt, output, _depth, _think, _api, kept, new in line["requests"]:
            names = names[:kept] + new
            first = first or names
            shared = [
                ("tools", line["model"], tools) if (i + 1) * TRACE_BLOCK <= tools else ("system", line["model"], system)
                for i in range(min(system // TRACE_BLOCK, len(names)))
            ]
            own = [(number, name) for name in names]
            same = sum(1 for a, b in zip(names[: len(shared)], first, strict=False) if a == b)
            chain = numbers.chain([*shared[:same], *own[same:]])
            requests.append(Request(0, start + at, prompt, output, chain, message_starts=[system]))
    return requests


def _continue(requests: list[Request]) -> None:
    """Fill in each request's partial block and output, and how long it runs."""
    later: dict[int, Request] = {}
    fresh = 1 + max((max(request.chain) for request in requests if request.chain), default=0)
    for request in reversed(requests):
        request.duration_s = STEP_S + TOKEN_S * request.output_tokens
        known, length = len(request.chain), -(-request.num_tokens // TRACE_BLOCK)
        following = later.get(request.chain[-1]) if known else None
        for number in request.chain:
            later[number] = request
        if (
            following is not None
            and following.start_s > request.start_s
            and following.prompt_tokens >= request.num_tokens
        ):
            request.chain = following.chain[:length]
            request.duration_s = min(request.duration_s, following.start_s - request.start_s)
            known_starts = {*following.message_starts, request.prompt_tokens, request.num_tokens}
            following.message_starts = sorted(known_starts)
        else:
            request.chain.extend(range(fresh, fresh + length - known))
            fresh += length - known
