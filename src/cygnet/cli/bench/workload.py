"""What a benchmark asks: sessions of turns, built from a seed alone, so that two runs ask the same."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

FIRST_TOKEN = 1000
"""Random token ids start here: below lie the special and byte tokens of the usual vocabularies."""

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend father power hour game line end member
law car city name team minute idea body back parent face level office door health person art war history party result
change morning reason research girl guy moment air teacher force
"""
_WORDS = tuple(_COMMON.split())


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
        """Prompt tokens of this turn itself; for a text an estimate (4 bytes a token)."""
        if self.text is not None:
            return max(1, len(self.text.encode()) // 4)
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class Session:
    """Turns that follow one another. With `growing`, a turn's prompt is all before it, answers included, plus its own
    pieces; without, each turn brings its whole prompt."""

    turns: tuple[Turn, ...]
    growing: bool = False
    arrival_s: float | None = None
    """When the first turn is due, from the start of the run; `None`: as soon as there is room."""


class TokenSource:
    """Makes the tokens of pieces. Token ids lie in `FIRST_TOKEN <= id < vocab_size`."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        import numpy

        if vocab_size <= FIRST_TOKEN:
            raise ValueError(f"vocab_size must be above {FIRST_TOKEN}, got {vocab_size}")
        self._numpy, self._seed, self._vocab_size = numpy, seed, vocab_size
        self._of_key = lru_cache(maxsize=4096)(self._make)

    def token_ids(self, pieces: Sequence[Piece]) -> list[int]:
        """The tokens of all pieces, in order."""
        return [token for piece in pieces for token in self._of_key(piece.key, piece.length)]

    def text(self, pieces: Sequence[Piece]) -> str:
        """The same prompt for a server that takes no token ids: common words, about one token each."""
        return "".join(f" {_WORDS[token % len(_WORDS)]}" for token in self.token_ids(pieces))

    def _make(self, key: str, length: int) -> list[int]:
        digest = hashlib.blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest()
        generator = self._numpy.random.Generator(self._numpy.random.PCG64(int.from_bytes(digest, "little")))
        floats = generator.random(length)  # one draw per token, so a prefix does not depend on the length
        return (FIRST_TOKEN + (floats * (self._vocab_size - FIRST_TOKEN)).astype("int64")).tolist()  # type: ignore[no-any-return]


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
        text = turn.text if turn.input_len <= room else turn.text.encode()[: 4 * room].decode(errors="ignore")
        return replace(turn, text=text, output_len=output_len)
    kept, left = [], room
    for piece in turn.pieces:
        if left <= 0:
            break
        kept.append(Piece(piece.key, min(piece.length, left)))
        left -= piece.length
    return replace(turn, pieces=tuple(kept), output_len=output_len)
