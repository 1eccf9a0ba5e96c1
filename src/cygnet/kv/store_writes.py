"""From the host tier to the store: what to put, in what order, how much at once.

A put of an object that the store has costs next to nothing and keeps it from being evicted. So there is one way to
write, to mend what the store has lost, and to keep alive what is hot in the faster tiers: put it (again), at most once
per `keep_alive_ns`.
"""

from collections import OrderedDict
from dataclasses import dataclass

from cygnet.base.ids import NO_BLOCK, BlockId
from cygnet.kv.host_tier import HostTier, Pin
from cygnet.kv.node import NEVER, Node
from cygnet.kv.policy import TierPolicy
from cygnet.kv.store import Group, Namespace, ObjectKey, Outcome, object_key
from cygnet.kv.transfers import Outbox, Put, Stored

OBJECTS_PER_PUT = 256
MOST_QUEUED = 4096


@dataclass(frozen=True, slots=True)
class _Sent:
    """A put on its way."""

    pin: Pin
    items: tuple[tuple[Node, Group], ...]


class StoreWrites:
    """Queue of host nodes whose path or window is worth storing, and the puts on their way.

    Invariant (`audit`): the objects on their way are counted, and at most `max_put_objects`.
    """

    def __init__(self, host: HostTier, namespace: Namespace, outbox: Outbox, policy: TierPolicy) -> None:
        self._host = host
        self._namespace = namespace
        self._outbox = outbox
        self._policy = policy
        self._queue: OrderedDict[tuple[Node, bool], int] = OrderedDict()
        """Nodes, or windows that end with them, and since when they are wanted."""
        self._sent: dict[int, _Sent] = {}
        self._num_sent = 0
        self.stored_objects_total = self.failed_objects_total = self.dropped_total = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or on its way."""
        return not self._queue and not self._sent

    @property
    def num_waiting_objects(self) -> int:
        """Objects on their way."""
        return self._num_sent

    @property
    def num_queued(self) -> int:
        """Paths and windows whose turn has not come."""
        return len(self._queue)

    def keep(self, node: Node, now_ns: int, *, window: bool) -> None:
        """The path to the host's `node`, or the window that ends with it, is worth storing. What is queued longest is
        forgotten where the store can't keep up: the next use of it brings it back."""
        self._queue[node, window] = now_ns
        if len(self._queue) > MOST_QUEUED:
            self._queue.popitem(last=False)
            self.dropped_total += 1

    def pump(self, now_ns: int) -> None:
        """Send puts for what is queued, oldest first, while few enough objects are on their way."""
        while self._queue and (room := self._policy.max_put_objects - self._num_sent) > 0:
            (node, window), since_ns = self._queue.popitem(last=False)
            if self._host.tree.get(node.key) is not node:
                continue  # evicted while it waited
            stale_ns = since_ns - self._policy.keep_alive_ns
            items = self._window(node, stale_ns) if window else self._path(node, stale_ns)
            self._send(items[: min(room, OBJECTS_PER_PUT)], now_ns)
            if len(items) > min(room, OBJECTS_PER_PUT):
                self._queue[node, window] = since_ns
                self._queue.move_to_end((node, window), last=False)

    def _path(self, node: Node, stale_ns: int) -> list[tuple[Node, Group]]:
        """What was not put since `stale_ns` of the path to `node`, from the left."""
        stale: list[tuple[Node, Group]] = []
        at: Node | None = node
        while at is not None and at.stored_ns < stale_ns:
            stale.append((at, Group.FULL))
            at = at.parent
        return stale[::-1]

    def _window(self, node: Node, stale_ns: int) -> list[tuple[Node, Group]]:
        members = list(node.path_up(self._host.tree.window_blocks))[::-1]
        return [(m, Group.SWA) for m in members if m.swa_block != NO_BLOCK and m.swa_stored_ns < stale_ns]

    def _send(self, items: list[tuple[Node, Group]], now_ns: int) -> None:
        if not items:
            return
        ticket = self._outbox.new_ticket()
        keys: list[ObjectKey] = []
        blocks: list[BlockId] = []
        for node, group in items:
            _set_stored(node, group, now_ns)
            keys.append(object_key(self._namespace, group, node.key))
            blocks.append(node.full_block if group is Group.FULL else node.swa_block)
        groups = tuple(group for _, group in items)
        self._outbox.commands.append(Put(ticket, tuple(keys), groups, tuple(blocks)))
        # The last node lies below all others, and window members within a window of it.
        pin = self._host.pin(items[-1][0], window=items[0][1] is Group.SWA)
        self._sent[ticket] = _Sent(pin, tuple(items))
        self._num_sent += len(items)

    def stored(self, result: Stored, now_ns: int) -> None:
        """A put has been answered."""
        sent = self._sent.pop(result.ticket)
        self._num_sent -= len(sent.items)
        self._host.unpin(sent.pin)
        for (node, group), outcome in zip(sent.items, result.outcomes, strict=True):
            if outcome is Outcome.OK:
                self.stored_objects_total += 1
            else:
                self.failed_objects_total += 1
                _set_stored(node, group, NEVER)
        self.pump(now_ns)

    def clear(self) -> None:
        """Forget what is queued, and that anything was stored; puts on their way go on."""
        self._queue.clear()
        for node in self._host.tree.nodes():
            node.stored_ns = node.swa_stored_ns = NEVER

    def audit(self) -> list[str]:
        """All discrepancies."""
        count = sum(len(sent.items) for sent in self._sent.values())
        if count != self._num_sent or count > self._policy.max_put_objects:
            return [f"store writes: {count} objects on their way, {self._num_sent} counted"]
        return []


def _set_stored(node: Node, group: Group, when_ns: int) -> None:
    if group is Group.FULL:
        node.stored_ns = when_ns
    else:
        node.swa_stored_ns = when_ns
