"""The workers as the router knows them."""

from typing import Literal

import msgspec

Role = Literal["serve", "prefill", "decode", "encode"]


class WorkerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a registry keeps of one worker: what every router instance must agree on."""

    url: str
    """`http://host:port`, without a path. Names the worker."""
    group: str = ""
    """Length bucket it serves; empty: all lengths."""
    role: Role = "serve"
    draining: bool = False
    """Gets no new requests; those it has go on."""
    expires_at: int = 0
    """Milliseconds of the registry's clock at which it leaves unless it registers again; 0: never."""


class Roster(msgspec.Struct, frozen=True):
    """All registered workers by slot, and the number of changes so far. `epoch` differs after the state was lost."""

    epoch: int
    version: int
    workers: dict[int, WorkerRecord]


class Member(msgspec.Struct, frozen=True):
    """A worker that a request may go to now: registered, healthy, not draining, serving the model."""

    slot: int
    url: str
    group: str = ""
