"""From a scenario's `[workload]` to the sessions that are simulated."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cygnet.base.errors import ConfigError
from cygnet.sim.agents import fit, generate
from cygnet.sim.scenario import Scenario
from cygnet.sim.sessions import Session, overlaid, sped_up, with_poisson_arrivals


@dataclass(frozen=True)
class Workload:
    """Sessions in the order of their arrivals, made as they are needed, and how many requests they are."""

    sessions: Iterable[Session]
    num_requests: int


def workload(scenario: Scenario, trace: Sequence[Session] | None) -> Workload:
    """What `scenario` asks; `trace` are the sessions of its trace, `None` where it has none.

    Raises `ConfigError` where neither the trace nor `workload.rate` says when sessions come.
    """
    asked = scenario.workload
    if trace is None or asked.fit:
        profile = asked.agents.profile() if trace is None else fit(trace)
        if asked.rate <= 0:
            raise ConfigError("generated agents need workload.rate, in sessions per second")
        base: Sequence[Session] = generate(
            profile, num_sessions=asked.agents.sessions, rate=asked.rate, seed=scenario.seed
        )
    else:
        base = [sped_up(session, asked.speed) for session in trace]
        if asked.rate > 0:
            base = with_poisson_arrivals(base, asked.rate, scenario.seed)
        elif any(session.arrival_s is None for session in base):
            raise ConfigError("this trace has no arrival times; set workload.rate, in sessions per second")
        base = sorted(base, key=lambda session: session.arrival_s or 0.0)
    requests = sum(len(session.turns) for session in base)
    return Workload(_scaled(base, asked.overlay, asked.copies), requests * asked.overlay * asked.copies)


def _scaled(base: Sequence[Session], overlay: int, copies: int) -> Iterator[Session]:
    """`copies` times, one after another, `overlay` copies at once. Lazy: a long run's sessions are never all there."""
    gap = _gap(base)
    for number in range(copies):
        after_s = number * (_span(base) + gap)
        yield from overlaid(base, overlay, spread_s=gap / overlay, first=number * overlay, after_s=after_s)


def _span(sessions: Sequence[Session]) -> float:
    """Seconds from the first arrival to the last."""
    return (sessions[-1].arrival_s or 0.0) - (sessions[0].arrival_s or 0.0)


def _gap(sessions: Sequence[Session]) -> float:
    """Mean seconds between arrivals."""
    return _span(sessions) / max(1, len(sessions) - 1)
