"""Trace files as sessions; `.gz` files are read as they are. `cygnet.sim.traces` knows the formats."""

import gzip
from itertools import islice
from pathlib import Path

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.sim.sessions import Session
from cygnet.sim.traces import __doc__ as formats
from cygnet.sim.traces import read_sessions


def load_trace(file: Path, limit: int | None) -> list[Session]:
    """The first `limit` sessions of a trace (for traces without sessions: requests), arrivals counted from 0.

    Raises `ConfigError` for a file that can't be read or is of none of the known formats.
    """
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
            sessions = list(islice(read_sessions(stream), limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read trace {file}: {error}") from None
    except (msgspec.DecodeError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"trace {file} is of no known format ({error}); known: {formats}") from None
    if not sessions:
        raise ConfigError(f"trace {file} has no requests")
    start = min(session.arrival_s or 0.0 for session in sessions)
    return [
        Session(session.turns, session.growing, None if session.arrival_s is None else session.arrival_s - start)
        for session in sessions
    ]
