"""What a server that can't reach the registry asks the others: whether they have gone on without it.

A server that is cut off from the registry alone hears of its being given up here, and stops to answer by its old view.
One that must be sure of its view (`fenced`) goes on only as long as nobody can have given it up. Others do that when
they have missed its sign of life in the registry for the whole grace, so it may go on for the grace after

    it last reached the registry, and showed its sign of life there; or
    all the others have said that they can't reach the registry either: then nobody's grace runs.
"""

import threading
import time
from collections.abc import Sequence

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import Server, State
from cygnet.gcache.protocol import Op
from cygnet.gcache.runtime.agent import Agent
from cygnet.gcache.runtime.channel import Address, Peer
from cygnet.gcache.runtime.client import ClientOptions, Means
from cygnet.gcache.runtime.cluster import Cluster
from cygnet.gcache.runtime.lanes import FAILURES
from cygnet.gcache.runtime.peer_in_epoch import newer_view

ASK_S = 1.0
"""How often, while the registry can't be reached."""
ASK_TIMEOUT_S = 1.0


class Sight(msgspec.Struct, frozen=True):
    """What a server says of the registry, of all that STAT tells."""

    registry_problem: str
    registry_looked_s: float


class Inquiry:
    """One thread, from `start` to `close`."""

    def __init__(self, cluster: Cluster, agent: Agent, *, token: str, fenced: bool) -> None:
        self._cluster = cluster
        self._agent = agent
        self._fenced = fenced
        self._options = ClientOptions(token=token, connections=1, io_threads=0, same_host=False)
        self._means = Means.of(self._options)
        self._peers: dict[tuple[str, str, int], Peer] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gcache-inquiry", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; waits for what is being asked."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        for peer in self._peers.values():
            peer.close()
        self._means.close(time.monotonic() + ASK_TIMEOUT_S)

    def ask(self) -> None:
        """Ask everyone once. A newer view is adopted; if nobody sees the registry, this server's is confirmed."""
        view, me = self._cluster.view, self._cluster.server_id
        if not view.placements:
            return  # it has not joined yet
        others = [server for server in view.servers if server.state is not State.DOWN and server.id != me]
        began = time.monotonic()
        unseen_s = [self._ask(peer) for peer in self._peers_of(others)]
        if self._cluster.epoch == view.epoch:
            confirmed = confirmed_at(unseen_s, began)
            if confirmed is not None:
                self._cluster.confirm(confirmed)

    def _run(self) -> None:
        while not self._stop.wait(ASK_S):
            if self._agent.problem or not self._cluster.is_confirmed:
                self.ask()

    def _ask(self, peer: Peer) -> float | None:
        """For how long it has not looked into the registry, if what it saw before does not count."""
        try:
            newer = newer_view(peer, self._cluster.epoch, ASK_TIMEOUT_S)
            if newer is not None:
                self._cluster.adopt(newer)
                return None
            if not self._fenced:
                return None
            with peer.channel(time.monotonic() + ASK_TIMEOUT_S) as channel:
                sight = msgspec.json.decode(channel.call(Op.STAT, expected=4096), type=Sight)
        except (*FAILURES, ConfigError, msgspec.DecodeError):
            return None
        return sight.registry_looked_s if sight.registry_problem else None

    def _peers_of(self, servers: Sequence[Server]) -> list[Peer]:
        wanted = {(server.id, server.host, server.port) for server in servers}
        for where in [where for where in self._peers if where not in wanted]:
            self._peers.pop(where).close()
        for id_, host, port in wanted - self._peers.keys():
            self._peers[id_, host, port] = self._means.peer(Address(host, port, id_), self._options)
        return list(self._peers.values())


def confirmed_at(unseen_s: Sequence[float | None], asked_at: float) -> float | None:
    """Since when at the earliest anyone's grace for this server can run; `None`: it may run already.

    `unseen_s`: how long ago each other server looked into the registry last, `None` for one that sees it, or does not
    answer. All of these answers are to questions asked after `asked_at`.
    """
    if any(one is None for one in unseen_s):
        return None
    return asked_at - max((one for one in unseen_s if one is not None), default=0.0)
