"""Sessions of coding agents, generated from a few distributions that can be fitted to a trace.

    session   system prompt and tools | question | answer | tool result | answer | ... | question | ...
              one of a few, shared                                                  ^ a person thinks, or a tool runs

A session's turns grow: each prompt is all before it, answers included. A sub-agent is a session of its own, with the
same system prompt, that begins while its parent runs. A session that would outgrow `max_context` goes on as a new one
from a summary.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import TypeVar

from cygnet.base.errors import ConfigError
from cygnet.sim.sessions import Piece, Session, Turn

T = TypeVar("T", int, float)

SUMMARY_TOKENS = 2048
TURN_SECONDS = 5.0
"""What a turn is taken to last where a sub-agent's start is laid into its parent: answers are not timed here."""


@dataclass(frozen=True)
class Spread:
    """A log-normal distribution: half of all draws are below `median`, two thirds within a factor of `exp(sigma)`."""

    median: float
    sigma: float

    def draw(self, source: random.Random, *, most: float = math.inf) -> float:
        return min(most, self.median * math.exp(self.sigma * source.gauss(0.0, 1.0)))

    def tokens(self, source: random.Random, *, most: int) -> int:
        return max(1, min(most, round(self.draw(source))))


@dataclass(frozen=True)
class AgentProfile:
    """What sessions are like. Lengths are in tokens, pauses in seconds."""

    turns: Spread = Spread(20, 1.0)
    system_tokens: Spread = Spread(12_000, 0.5)
    num_systems: int = 8
    """Different system prompts; each is shared by the sessions that have it, the first by most (1, 1/2, 1/3 ...)."""
    first_tokens: Spread = Spread(1000, 1.2)
    added_tokens: Spread = Spread(700, 1.4)
    """Tool results and questions, per turn."""
    output_tokens: Spread = Spread(200, 1.0)
    pause_s: Spread = Spread(5.0, 1.5)
    subagents_per_turn: float = 0.02
    subagent_turns: Spread = Spread(6, 0.7)
    max_context: int = 200_000


def generate(profile: AgentProfile, *, num_sessions: int, rate: float, seed: int) -> list[Session]:
    """`num_sessions` sessions that start at a Poisson process of `rate` per second, and the sub-agents and successors
    that come of them, in the order of their starts. The same seed gives the same sessions."""
    if num_sessions < 1 or rate <= 0:
        raise ConfigError(f"agents: num_sessions = {num_sessions} and rate = {rate} must be above 0")
    source = random.Random(seed)
    systems = [Piece(f"shared-system-{k}", profile.system_tokens.tokens(source, most=profile.max_context // 2))
               for k in range(profile.num_systems)]  # fmt: skip
    popularity = [1 / (k + 1) for k in range(profile.num_systems)]
    sessions: list[Session] = []
    now = 0.0
    for number in range(num_sessions):
        (system,) = source.choices(systems, popularity)
        turns = profile.turns.tokens(source, most=1000)
        sessions += _Conversation(profile, source, system, f"agent-{number}", now).run(turns, may_branch=True)
        now += source.expovariate(rate)
    return sorted(sessions, key=lambda session: session.arrival_s or 0.0)


class _Conversation:
    """One agent at work: makes its sessions, and those of its sub-agents."""

    def __init__(self, profile: AgentProfile, source: random.Random, system: Piece, name: str, start_s: float) -> None:
        self._profile, self._source, self._system, self._name = profile, source, system, name
        self._start_s = self._now_s = start_s
        self._turns: list[Turn] = []
        self._context = 0
        self._done: list[Session] = []

    def run(self, turns: int, *, may_branch: bool) -> list[Session]:
        profile, source = self._profile, self._source
        others: list[Session] = []
        for index in range(turns):
            spread = profile.first_tokens if index == 0 else profile.added_tokens
            added = spread.tokens(source, most=profile.max_context // 4)
            output = profile.output_tokens.tokens(source, most=profile.max_context // 8)
            pause = 0.0 if index == 0 else profile.pause_s.draw(source, most=3600.0)
            self._now_s += pause + (TURN_SECONDS if index else 0.0)
            self._add(index, added, output, pause)
            if may_branch and source.random() < profile.subagents_per_turn:
                child = _Conversation(profile, source, self._system, f"{self._name}/{index}", self._now_s)
                others += child.run(profile.subagent_turns.tokens(source, most=200), may_branch=False)
        self._close()
        return self._done + others

    def _add(self, index: int, added: int, output: int, pause_s: float) -> None:
        own = Piece(f"{self._name}-{index}", added)
        if self._turns and self._context + added + output > self._profile.max_context:
            self._close()
            self._start_s, pause_s = self._now_s, 0.0
            pieces: tuple[Piece, ...] = (self._system, Piece(f"{self._name}-summary-{index}", SUMMARY_TOKENS), own)
        else:
            pieces = (own,) if self._turns else (self._system, own)
        self._context += sum(piece.length for piece in pieces) + output
        self._turns.append(Turn(pieces=pieces, output_len=output, delay_s=pause_s))

    def _close(self) -> None:
        if self._turns:
            self._done.append(Session(tuple(self._turns), growing=True, arrival_s=self._start_s))
        self._turns, self._context = [], 0


# ---------------------------------------------------------------------- fitting


def fit(sessions: Sequence[Session], *, subagents_per_turn: float = 0.0) -> AgentProfile:
    """The profile whose sessions look like the given ones: turns, lengths, pauses, and how much they share.

    What sessions share is told from their first pieces. A trace does not say which of its sessions are sub-agents of
    which, so their share is given, not fitted. A tenth of the sessions may have outgrown `max_context`: recorded ones
    shrink at limits that the trace does not state. Raises `ConfigError` for a trace without a session of several turns.
    """
    if not any(len(session.turns) > 1 for session in sessions):
        raise ConfigError("agents: a trace without sessions of several turns says nothing of agents")
    systems: dict[str, int] = {}
    firsts, added, outputs, pauses, longest = [], [], [], [], []
    for session in sessions:
        shared = _shared_tokens(session.turns[0])
        if shared:
            systems[session.turns[0].pieces[0].key + f"/{shared}"] = shared
        firsts.append(max(1, session.turns[0].input_len - shared))
        before = peak = 0
        for index, turn in enumerate(session.turns):
            context = before + turn.input_len if session.growing else turn.input_len
            if index:
                grown = turn.input_len if session.growing else context - before
                if grown > 0:
                    added.append(grown)
                pauses.append(turn.delay_s)
            outputs.append(turn.output_len)
            before = context + turn.output_len
            peak = max(peak, before)
        longest.append(peak)
    return AgentProfile(
        turns=_spread([len(session.turns) for session in sessions]),
        system_tokens=_spread(list(systems.values()) or [1]),
        num_systems=max(1, len(systems)),
        first_tokens=_spread(firsts),
        added_tokens=_spread(added or [1]),
        output_tokens=_spread(outputs),
        pause_s=_spread([pause for pause in pauses if pause > 0] or [0.001]),
        subagents_per_turn=subagents_per_turn,
        max_context=_high(longest),
    )


def _shared_tokens(turn: Turn) -> int:
    """Tokens of the leading pieces whose names say that sessions share them."""
    count = 0
    for piece in turn.pieces:
        if not piece.key.startswith("shared"):
            break
        count += piece.length
    return count


_UPPER = NormalDist().inv_cdf(0.9)


def _spread(values: Sequence[float]) -> Spread:
    """The log-normal with the values' median, and their 90th percentile where they spread upwards: tails matter more
    here than the shape below."""
    middle = max(1e-3, median(values))
    return Spread(middle, math.log(max(middle, _high(values)) / middle) / _UPPER)


def _high(values: Sequence[T]) -> T:
    """The 90th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]
