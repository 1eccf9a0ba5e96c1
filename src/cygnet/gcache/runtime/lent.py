"""A connection of a peer for the length of a `with` block."""

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cygnet.gcache.runtime.channel import Channel, Peer


class Lent:
    """See `Peer.channel`."""

    __slots__ = ("_background", "_budget_s", "_channel", "_deadline", "_peer", "_unix")

    def __init__(self, peer: "Peer", deadline: float, unix: bool, background: bool = False) -> None:
        self._background = background
        self._peer = peer
        self._deadline = deadline
        self._unix = unix

    def __enter__(self) -> "Channel":
        peer, deadline, unix = self._peer, self._deadline, self._unix
        self._budget_s = 0.0 if self._background else deadline - time.monotonic()
        channel = peer.check_out(deadline, unix=unix)
        try:
            if channel is None or not channel.looks_open():
                if channel is not None:
                    channel.wire.close()
                    channel = None
                channel = peer.connect(deadline, unix=unix)
            channel.wire.arm(deadline)
        except BaseException as error:
            self._give_up(channel, error)
            raise
        self._channel = channel
        return channel

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._peer.check_in(self._channel, unix=self._unix)
        else:
            self._give_up(self._channel, error)

    def _give_up(self, channel: "Channel | None", error: BaseException) -> None:
        if channel is not None:
            channel.wire.close()
        self._peer.failed(error, self._budget_s, unix=self._unix)
