"""Servers as a client sees them at one epoch of their cluster."""

import time
from collections.abc import Callable
from types import TracebackType

from cygnet.gcache.membership import View
from cygnet.gcache.protocol import Op, pack_number
from cygnet.gcache.runtime.attached import Attached
from cygnet.gcache.runtime.channel import Channel, Lent, Peer, UnavailableError, WrongEpochError
from cygnet.gcache.runtime.cluster import decode_view


def newer_view(peer: Peer, epoch: int, timeout_s: float) -> View | None:
    """The server's view if that is newer; `None` also when it is in no cluster. Raises `FAILURES` and `ConfigError`."""
    with peer.channel(time.monotonic() + timeout_s, background=True) as channel:
        answer = channel.call(Op.MEMBERS, pack_number(epoch))
    return decode_view(answer) if answer else None


class PeerInEpoch:
    """A peer for requests of one epoch: what `Peer` has, as far as operations use it."""

    def __init__(self, peer: Peer, epoch: int, refused: Callable[[Peer, WrongEpochError], None]) -> None:
        self.peer = peer
        self.epoch = epoch
        self.refused = refused
        self.address = peer.address
        self.max_connections = peer.max_connections

    @property
    def is_failing(self) -> bool:
        return self.peer.is_failing

    @property
    def may_be_local(self) -> bool:
        return self.peer.may_be_local

    def is_local(self, deadline: float) -> bool:
        return self.peer.is_local(deadline)

    def attached(self, deadline: float) -> Attached | None:
        return self.peer.attached(deadline)

    def detach(self, attached: Attached) -> None:
        self.peer.detach(attached)

    def channel(self, deadline: float, *, unix: bool = False) -> "LentInEpoch":
        return LentInEpoch(self, self.peer.channel(deadline, unix=unix))


class LentInEpoch:
    """A connection for the length of a `with` block, whose requests carry the epoch."""

    __slots__ = ("_lent", "_owner")

    def __init__(self, owner: PeerInEpoch, lent: Lent) -> None:
        self._owner = owner
        self._lent = lent

    def __enter__(self) -> Channel:
        channel = self._lent.__enter__()
        channel.epoch = self._owner.epoch
        return channel

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lent.__exit__(kind, error, trace)
        if isinstance(error, WrongEpochError):
            self._owner.refused(self._owner.peer, error)


class Gone:
    """In place of a server that is down."""

    max_connections = 1
    is_failing = True
    may_be_local = False
    epoch = 0

    def is_local(self, deadline: float) -> bool:
        return False

    def attached(self, deadline: float) -> None:
        return None

    def channel(self, deadline: float, *, unix: bool = False) -> LentInEpoch:
        raise UnavailableError("the gcache server is down")
