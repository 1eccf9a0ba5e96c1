"""The store tier as the pure side knows it: what to read and write there, and what comes of it."""

from collections.abc import Callable, Iterable, Sequence

from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import RequestId
from cygnet.kv.host_tier import HostTier
from cygnet.kv.node import Node
from cygnet.kv.policy import TierPolicy
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.reuse import ReusePlan
from cygnet.kv.store import Namespace
from cygnet.kv.store_reads import StoreReads
from cygnet.kv.store_writes import StoreWrites
from cygnet.kv.transfers import ClearStore, Fetched, Found, Outbox, StoreCommand, StoreResult


class StoreTier:
    """Both ways between host tier and store.

    Commands are decided here and carried out elsewhere; `handle` takes in what became of them, between two steps.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        host: HostTier,
        namespace: Namespace,
        policy: TierPolicy,
        plan: Callable[[RequestKV, int], ReusePlan],
    ) -> None:
        self._outbox = Outbox()
        self.reads = StoreReads(geometry, host, namespace, self._outbox, policy, plan)
        self.writes = StoreWrites(host, namespace, self._outbox, policy)

    def keep(self, node: Node, now_ns: int, *, window: bool) -> None:
        """The path to the host's `node`, or the window that ends with it, is there and worth storing."""
        self.writes.keep(node, now_ns, window=window)

    def pump(self, now_ns: int) -> None:
        """Decide what to write next."""
        self.writes.pump(now_ns)

    @property
    def num_queued(self) -> int:
        """Paths and windows that wait to be put."""
        return self.writes.num_queued

    def take_commands(self) -> Sequence[StoreCommand]:
        """Commands decided since the last call, in order."""
        return self._outbox.take()

    def handle(self, results: Iterable[StoreResult], now_ns: int) -> list[RequestId]:
        """Take in results. Requests that need not wait for the store any longer."""
        ready: list[RequestId] = []
        for result in results:
            if isinstance(result, Found):
                ready += self.reads.found(result, now_ns)
            elif isinstance(result, Fetched):
                ready += self.reads.fetched(result, now_ns)
            else:
                self.writes.stored(result, now_ns)
        return ready

    def clear(self) -> None:
        """Give up all that the store holds of this model."""
        self.writes.clear()
        self._outbox.commands.append(ClearStore())

    def audit(self) -> list[str]:
        """All discrepancies."""
        return self.reads.audit() + self.writes.audit()
