"""What is asked of a server or a simulated one: sessions of turns. Pure data, and what is done to it.

Benchmarks turn pieces into tokens (`cli.bench.workload`); the simulator needs their names only (`sim.prompts`).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from typing import NamedTuple

BYTES_PER_TOKEN = 4
"""Of text, where there is no tokenizer to ask."""


class Piece(NamedTuple):
    """`length` random tokens named by `key`: equal keys give equal tokens, a longer piece continues a shorter one."""

    key: str
    length: int


@dataclass(frozen=True)
class Turn:
    """One request: its prompt as pieces of random tokens or as `text`, and how many tokens to ask for."""

    pieces: tuple[Piece, ...] = ()
    text: str | None = None
    output_len: int = 16
    delay_s: float = 0.0
    """Pause after the session's previous answer (think time)."""

    @property
    def input_len(self) -> int:
        """Prompt tokens of this turn itself; for a text an estimate."""
        if self.text is not None:
            return max(1, len(self.text.encode()) // BYTES_PER_TOKEN)
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class Session:
    """Turns that follow one another. With `growing`, a turn's prompt is all before it, answers included, plus its own
    pieces; without, each turn brings its whole prompt."""

    turns: tuple[Turn, ...]
    growing: bool = False
    arrival_s: float | None = None
    """When the first turn is due, from the start of the run; `None`: as soon as there is room."""


def random_sessions(
    *, num_sessions: int, turns: int, input_len: int, output_len: int, shared_prefix_len: int
) -> list[Session]:
    """Sessions that share their first `shared_prefix_len` tokens; every turn adds `input_len` tokens of its own."""
    sessions = []
    for index in range(num_sessions):
        asked = []
        for turn in range(turns):
            pieces: tuple[Piece, ...] = (Piece(f"session-{index}-{turn}", input_len),)
            if turn == 0 and shared_prefix_len:
                pieces = (Piece("shared", shared_prefix_len), *pieces)
            asked.append(Turn(pieces=pieces, output_len=output_len))
        sessions.append(Session(turns=tuple(asked), growing=turns > 1))
    return sessions


def with_poisson_arrivals(sessions: Sequence[Session], rate: float, seed: int) -> list[Session]:
    """Sessions in the same order, starting at a Poisson process of `rate` per second."""
    draw, now, result = random.Random(seed), 0.0, []
    for session in sessions:
        result.append(replace(session, arrival_s=now))
        now += draw.expovariate(rate)
    return result


def sped_up(session: Session, factor: float) -> Session:
    """The session with its arrival and its pauses `factor` times sooner."""
    arrival_s = None if session.arrival_s is None else session.arrival_s / factor
    turns = tuple(replace(turn, delay_s=turn.delay_s / factor) for turn in session.turns)
    return replace(session, arrival_s=arrival_s, turns=turns)


def limited(
    sessions: Sequence[Session], *, max_input: int | None, max_output: int | None, max_total: int | None
) -> tuple[list[Session], int]:
    """Sessions whose independent turns fit the limits: long prompts lose their *end*, so that shared prefixes stay.

    Also returns how many turns were shortened. Turns of growing sessions keep their length (the server refuses what
    does not fit, and the report says so).
    """
    shortened, result = 0, []
    for session in sessions:
        turns = []
        for turn in session.turns:
            output_len = min(turn.output_len, max_output or turn.output_len)
            room = max_input or turn.input_len
            if max_total is not None:
                output_len = max(1, min(output_len, max_total // 2))
                room = min(room, max_total - output_len)
            fitted = replace(turn, output_len=output_len) if session.growing else _cut(turn, room, output_len)
            shortened += fitted.input_len < turn.input_len or fitted.output_len < turn.output_len
            turns.append(fitted)
        result.append(replace(session, turns=tuple(turns)))
    return result, shortened


def _cut(turn: Turn, room: int, output_len: int) -> Turn:
    if turn.text is not None:
        text = (
            turn.text
            if turn.input_len <= room
            else turn.text.encode()[: BYTES_PER_TOKEN * room].decode(errors="ignore")
        )
        return replace(turn, text=text, output_len=output_len)
    kept, left = [], room
    for piece in turn.pieces:
        if left <= 0:
            break
        kept.append(Piece(piece.key, min(piece.length, left)))
        left -= piece.length
    return replace(turn, pieces=tuple(kept), output_len=output_len)


def repeated(sessions: Sequence[Session], count: int, *, every_s: float, shared: str = "shared-") -> Iterator[Session]:
    """`count` copies of the sessions one after another, `every_s` apart, each about texts of its own: a larger
    population. Pieces whose key begins with `shared` stay common to all copies. Lazy."""
    for number in range(count):
        yield from _copy(sessions, number, number * every_s, shared)


def overlaid(
    sessions: Sequence[Session], count: int, *, spread_s: float, first: int = 0, after_s: float = 0.0
) -> Iterator[Session]:
    """`count` copies of the sessions at once, `spread_s` apart: the same pattern of arrivals, `count` times as dense.

    The sessions must be in the order of their arrivals, and so is what comes out. Copies are numbered from `first`, and
    begin `after_s`. Lazy.
    """
    copies = (_copy(sessions, first + place, after_s + place * spread_s, "shared-") for place in range(count))
    return merge(*copies, key=lambda session: session.arrival_s or 0.0)


def _copy(sessions: Sequence[Session], number: int, after_s: float, shared: str) -> Iterator[Session]:
    """The sessions `after_s` later; all copies but number 0 are about texts of their own."""
    for session in sessions:
        arrival_s = None if session.arrival_s is None else session.arrival_s + after_s
        turns = session.turns if number == 0 else tuple([_renamed(turn, number, shared) for turn in session.turns])
        yield Session(turns, session.growing, arrival_s)


def _renamed(turn: Turn, copy: int, shared: str) -> Turn:
    if turn.text is not None:
        return replace(turn, text=f"{copy} {turn.text}")
    pieces = [
        piece if piece.key.startswith(shared) else Piece(f"{copy}/{piece.key}", piece.length) for piece in turn.pieces
    ]
    return Turn(tuple(pieces), None, turn.output_len, turn.delay_s)
