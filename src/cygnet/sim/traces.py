"""Public request traces as sessions, from their lines. The format is told from the first line.

timestamp, input_length, output_length, hash_ids        Mooncake: ids name 512-token blocks, across requests
id, tool_tokens, system_tokens, requests: [...]         coding-agent sessions: block ids within one session
timestamp, input, output, session_id                    agent traces with their full text
prompt[, output_tokens]                                 vLLM's bench, custom dataset: texts without times
TIMESTAMP,ContextTokens,GeneratedTokens                 Azure: lengths only (CSV)
Timestamp,...,Request tokens,Response tokens,...        BurstGPT: lengths only, some with a session (CSV)
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain

import msgspec

from cygnet.sim.sessions import BYTES_PER_TOKEN, Piece, Session, Turn

BLOCK_TOKENS = 512
CUSTOM_OUTPUT_TOKENS = 256
"""Of a vLLM custom dataset's row that states none, as vLLM's bench takes it."""

Lines = Iterable[str]
Reader = Callable[[Lines], Iterator[Session]]


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _AgenticRow(msgspec.Struct):
    id: str
    tool_tokens: int
    system_tokens: int
    requests: list[tuple[float, int, int, int, float, float, int, list[int]]]


class _TextRow(msgspec.Struct):
    timestamp: float
    input: str
    output: str
    session_id: str | int | None = None


class _CustomRow(msgspec.Struct):
    prompt: str
    output_tokens: int = CUSTOM_OUTPUT_TOKENS


def read_sessions(lines: Lines) -> Iterator[Session]:
    """The sessions of a trace (for traces without sessions: requests), lazily where the format allows.

    Arrivals count from the trace's own zero. Raises `ValueError`, `KeyError`, `IndexError` or `msgspec.DecodeError` for
    lines of no known format.
    """
    iterator = iter(lines)
    first = next(iterator, "")
    return reader_for(first)(chain((first,), iterator))


def reader_for(first: str) -> Reader:
    """Which reader a trace that begins with line `first` needs."""
    if not first.lstrip().startswith("{"):
        columns = [column.strip() for column in first.split(",")]
        if "Request tokens" in columns:
            return read_burstgpt
        return read_azure
    keys = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).keys()
    for field, reader in _BY_FIELD.items():
        if field in keys:
            return reader
    raise ValueError(f"fields {', '.join(keys)}")


def _blocks(blocks: list[Piece], num_tokens: int) -> tuple[Piece, ...]:
    """Whole blocks and a last partial one that hold `num_tokens`; a chain too short is continued by a tail."""
    whole, left = divmod(num_tokens, BLOCK_TOKENS)
    if whole >= len(blocks):
        whole, left = len(blocks), num_tokens - len(blocks) * BLOCK_TOKENS
        last = Piece(f"{blocks[-1].key if blocks else ''}-tail", left)
    else:
        last = Piece(blocks[whole].key, left)
    return (*blocks[:whole], last) if left else tuple(blocks[:whole])


def read_mooncake(lines: Lines) -> Iterator[Session]:
    """Requests in the order of the file; equal ids are equal blocks."""
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line in lines:
        row = decoder.decode(line)
        blocks = [Piece(f"block-{block}", BLOCK_TOKENS) for block in row.hash_ids]
        turn = Turn(pieces=_blocks(blocks, max(1, row.input_length)), output_len=max(1, row.output_length))
        yield Session((turn,), arrival_s=row.timestamp / 1e3)


def read_agentic(lines: Lines) -> Iterator[Session]:
    """Block ids are local to a session. Tools and system prompt, which sessions share, are its first tokens: blocks
    that lie wholly within them get names common to all sessions. No arrivals: the sessions were recorded alone."""
    decoder = msgspec.json.Decoder(_AgenticRow)
    for line in lines:
        row = decoder.decode(line)
        shared = (row.tool_tokens + row.system_tokens) // BLOCK_TOKENS
        # A block has one name for each place it could be at: within the shared tokens, or after them.
        own: dict[int, Piece] = {}
        common = [Piece(f"shared-{index}", BLOCK_TOKENS) for index in range(shared)]
        ids: list[int] = []
        turns = []
        for _t, num_in, num_out, _depth, think_s, _api_s, kept, new_ids in row.requests:
            ids = [*ids[:kept], *new_ids]
            for block in new_ids:
                own.setdefault(block, Piece(f"{row.id}-{block}", BLOCK_TOKENS))
            blocks = [*common[: len(ids)], *(own[block] for block in ids[shared:])]
            pieces = _blocks(blocks, max(1, num_in))
            turns.append(Turn(pieces=pieces, output_len=max(1, num_out), delay_s=max(0.0, think_s)))
        if turns:
            yield Session(tuple(turns))


def read_agent_text(lines: Lines) -> Iterator[Session]:
    """Requests of one session in their order; each has its whole prompt. Sessions come in the order of their starts, so
    the whole file is read first."""
    decoder = msgspec.json.Decoder(_TextRow)
    rows: dict[str, list[_TextRow]] = {}
    for number, line in enumerate(lines):
        row = decoder.decode(line)
        rows.setdefault(str(row.session_id if row.session_id is not None else number), []).append(row)
    for session in sorted(rows.values(), key=lambda session: min(row.timestamp for row in session)):
        session.sort(key=lambda row: row.timestamp)
        turns = tuple(
            Turn(text=row.input or " ", output_len=max(1, len(row.output.encode()) // BYTES_PER_TOKEN))
            for row in session
        )
        yield Session(turns, arrival_s=session[0].timestamp / 1e6)


def read_custom(lines: Lines) -> Iterator[Session]:
    """Texts without times, each on its own."""
    decoder = msgspec.json.Decoder(_CustomRow)
    for line in lines:
        row = decoder.decode(line)
        yield Session((Turn(text=row.prompt or " ", output_len=max(1, row.output_tokens)),))


def read_azure(lines: Lines) -> Iterator[Session]:
    """Lengths and times; no prompt shares anything with another one."""
    for number, row in enumerate(csv.DictReader(iter(lines))):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26])
        yield _lengths_only(number, when.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def read_burstgpt(lines: Lines) -> Iterator[Session]:
    """Lengths and times in seconds. Rows of one session are taken as requests of their own, as what they share is not
    in the file; a failed request has no response and is left out."""
    for number, row in enumerate(csv.DictReader(iter(lines))):
        generated = int(row["Response tokens"])
        if generated > 0:
            yield _lengths_only(number, float(row["Timestamp"]), int(row["Request tokens"]), generated)


def _lengths_only(number: int, arrival_s: float, num_in: int, num_out: int) -> Session:
    turn = Turn(pieces=(Piece(f"request-{number}", max(1, num_in)),), output_len=max(1, num_out))
    return Session((turn,), arrival_s=arrival_s)


_BY_FIELD: dict[str, Reader] = {
    "hash_ids": read_mooncake,
    "requests": read_agentic,
    "input": read_agent_text,
    "prompt": read_custom,
}
"""Readers of JSON lines, by a field that only their format has."""
