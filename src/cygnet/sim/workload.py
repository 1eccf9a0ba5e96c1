"""From a scenario's `[workload]` to the sessions that are simulated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cygnet.base.errors import ConfigError
from cygnet.sim.agents import fit, generate
from cygnet.sim.scenario import Scenario
from cygnet.sim.sessions import Session, overlaid, repeated, sped_up, with_poisson_arrivals


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
    if asked.overlay > 1:
        base = list(overlaid(base, asked.overlay, spread_s=_gap(base) / asked.overlay))
    sessions: Iterable[Session] = base
    if asked.copies > 1:
        sessions = repeated(base, asked.copies, every_s=_span(base) + _gap(base))
    return Workload(sessions, requests * asked.overlay * asked.copies)


def _span(sessions: Sequence[Session]) -> float:
    """Seconds from the first arrival to the last."""
    return (sessions[-1].arrival_s or 0.0) - (sessions[0].arrival_s or 0.0)


def _gap(sessions: Sequence[Session]) -> float:
    """Mean seconds between arrivals."""
    return _span(sessions) / max(1, len(sessions) - 1)
