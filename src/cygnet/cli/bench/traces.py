"""Public request traces as sessions. The format is told from the first line; `.gz` files are read as they are.

timestamp, input_length, output_length, hash_ids        Mooncake: ids name 512-token blocks, across requests
id, tool_tokens, system_tokens, requests: [...]         coding-agent sessions: block ids within one session
timestamp, input, output, session_id                    agent traces with their full text
TIMESTAMP,ContextTokens,GeneratedTokens                 Azure: lengths only (CSV)
"""

import csv
import gzip
import io
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.cli.bench.workload import Piece, Session, Turn

BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 4


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


def load_trace(file: Path, limit: int) -> list[Session]:
    """The first `limit` sessions of a trace (for traces without sessions: requests), arrivals counted from 0.

    Raises `ConfigError` for a file that can't be read or is of none of the known formats.
    """
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
            first = stream.readline()
            read = _reader(first)
            sessions = list(islice(read(_Lines(first, stream)), limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read trace {file}: {error}") from None
    except (msgspec.DecodeError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"trace {file} is of no known format ({error}); known: {__doc__}") from None
    if not sessions:
        raise ConfigError(f"trace {file} has no requests")
    start = min(session.arrival_s or 0.0 for session in sessions)
    return [
        Session(session.turns, session.growing, None if session.arrival_s is None else session.arrival_s - start)
        for session in sessions
    ]


class _Lines:
    """The lines of a file whose first one has been looked at."""

    def __init__(self, first: str, rest: io.TextIOBase | io.TextIOWrapper | Iterator[str]) -> None:
        self._first, self._rest = first, rest

    def __iter__(self) -> Iterator[str]:
        yield self._first
        yield from self._rest


def _reader(first: str) -> Callable[[_Lines], Iterator[Session]]:
    if not first.lstrip().startswith("{"):
        return _azure
    keys = msgspec.json.decode(first, type=dict[str, msgspec.Raw]).keys()
    if "hash_ids" in keys:
        return _mooncake
    if "requests" in keys:
        return _agentic
    if "input" in keys:
        return _agent_text
    raise ValueError(f"fields {', '.join(keys)}")


def _blocks(keys: list[str], num_tokens: int) -> tuple[Piece, ...]:
    """Whole blocks and a last partial one that hold `num_tokens`; a chain too short is continued by a tail."""
    pieces, left = [], num_tokens
    for key in keys:
        if left <= 0:
            break
        pieces.append(Piece(key, min(BLOCK_TOKENS, left)))
        left -= BLOCK_TOKENS
    if left > 0:
        pieces.append(Piece(f"{keys[-1] if keys else ''}-tail", left))
    return tuple(pieces)


def _mooncake(lines: _Lines) -> Iterator[Session]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line in lines:
        row = decoder.decode(line)
        pieces = _blocks([f"block-{block}" for block in row.hash_ids], max(1, row.input_length))
        yield Session((Turn(pieces=pieces, output_len=max(1, row.output_length)),), arrival_s=row.timestamp / 1e3)


def _agentic(lines: _Lines) -> Iterator[Session]:
    """Block ids are local to a session. Tools and system prompt, which sessions share, are its first tokens: blocks
    that lie wholly within them get names common to all sessions."""
    decoder = msgspec.json.Decoder(_AgenticRow)
    for line in lines:
        row = decoder.decode(line)
        shared = (row.tool_tokens + row.system_tokens) // BLOCK_TOKENS
        chain: list[int] = []
        turns = []
        for _t, num_in, num_out, _depth, think_s, _api_s, kept, new_ids in row.requests:
            chain = [*chain[:kept], *new_ids]
            keys = [f"shared-{i}" if i < shared else f"{row.id}-{block}" for i, block in enumerate(chain)]
            turns.append(
                Turn(pieces=_blocks(keys, max(1, num_in)), output_len=max(1, num_out), delay_s=max(0.0, think_s))
            )
        if turns:
            yield Session(tuple(turns))


def _agent_text(lines: _Lines) -> Iterator[Session]:
    """Requests of one session in their order; each has its whole prompt. Sessions come in the order of their starts."""
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


def _azure(lines: _Lines) -> Iterator[Session]:
    for number, row in enumerate(csv.DictReader(iter(lines))):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26])
        piece = Piece(f"request-{number}", max(1, int(row["ContextTokens"])))
        yield Session(
            (Turn(pieces=(piece,), output_len=max(1, int(row["GeneratedTokens"]))),), arrival_s=when.timestamp()
        )
