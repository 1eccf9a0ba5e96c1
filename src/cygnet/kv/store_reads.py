"""From the store to the host tier, while a request waits.

    want ── Lookup ──► what is there? ── choose ──► Fetch, in pieces ──► adopted by the host's tree ──► ready

What to fetch is chosen as `plan_reuse` will choose when the request is admitted: the full KV up to the best boundary,
and the one window that this boundary needs, or none where a rebuild is cheaper. Each piece is usable as soon as it is
there; what comes late, torn or not at all leaves a shorter prefix, of which the best boundary is then used. So nothing
here ever fails: at worst the request computes what it would have computed anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from cygnet.base.geometry import KVGeometry
from cygnet.base.ids import NO_BLOCK, BlockId, BlockKey, RequestId
from cygnet.kv.host_tier import HostTier, Pin
from cygnet.kv.policy import TierPolicy
from cygnet.kv.request_kv import RequestKV
from cygnet.kv.reuse import ReusePlan, plan_reuse
from cygnet.kv.store import Group, Namespace, Outcome, object_keys
from cygnet.kv.transfers import Cancel, Fetch, Fetched, Found, Lookup, Outbox

OBJECTS_PER_FETCH = 256


@dataclass(slots=True, eq=False)
class _Wish:
    """A waiting request that may profit from the store."""

    kv: RequestKV
    num_tokens: int
    deadline_ns: int | None
    first: int = 0
    """Blocks that the host tier had when the store was asked."""
    lookup: int | None = None
    """Ticket of the lookup that is not answered yet."""
    fetches: dict[int, Sequence[bool] | None] = field(default_factory=dict)
    """Fetches on their way, by ticket and in the order in which the host tier can take them. One that is answered
    before its turn waits with what is good of it."""
    pin: Pin | None = None
    """What the fetches go on from, in the host tier."""
    done: bool = False
    """Nothing more is waited for; fetches may still be on their way."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A fetch on its way: blocks `indices` of the wish's sequence, into reserved blocks of the host tier."""

    wish: _Wish
    group: Group
    indices: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    boundary: int
    """Of a window: where it ends."""


class StoreReads:
    """Wishes of waiting requests and the fetches on their way.

    Invariants (`audit`): a wish is done, or waits for a lookup, fetches, or another wish's fetch; the host tier's
    reserved blocks are those of the pieces on their way.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        host: HostTier,
        namespace: Namespace,
        outbox: Outbox,
        policy: TierPolicy,
        plan: Callable[[RequestKV, int], ReusePlan],
    ) -> None:
        """`plan` says what a request with so many tokens would reuse now, from device and host."""
        self._geometry = geometry
        self._host = host
        self._namespace = namespace
        self._outbox = outbox
        self._policy = policy
        self._plan = plan
        self._window = host.tree.window_blocks
        self._block_size = host.sizes.block_size
        self._wishes: dict[RequestId, _Wish] = {}
        self._lookups: dict[int, _Wish] = {}
        self._pieces: dict[int, _Piece] = {}
        self._coming: dict[BlockKey, int] = {}
        """Full blocks on their way, and with which fetch."""
        self._behind: dict[int, list[_Wish]] = {}
        """Wishes that wait for another one's fetch, by its ticket."""
        self.lookups_total = self.found_objects_total = self.fetched_objects_total = self.lost_objects_total = 0
        self.timeouts_total = self.fetched_tokens_total = 0

    @property
    def num_waiting_objects(self) -> int:
        """Objects on their way."""
        return self._host.num_reserved

    # ------------------------------------------------------------------ requests

    def want(self, kv: RequestKV, num_tokens: int, now_ns: int) -> None:
        """A request with this KV begins to wait: see what the store has for it."""
        tokens = self._plan(kv, num_tokens).num_uncached_tokens
        wait_ns = self._policy.timeout_ns + tokens * self._policy.timeout_ns_per_ki_token // 1024
        wish = _Wish(kv, num_tokens, None if self._policy.wait == "wait" else now_ns + wait_ns)
        self._wishes[kv.request_id] = wish
        self._look(wish)

    def ready(self, request_id: RequestId, now_ns: int) -> bool:
        """Whether the request need not wait for the store, or not any longer."""
        wish = self._wishes.get(request_id)
        if wish is None or wish.done or self._policy.wait == "best_effort":
            return True
        if wish.deadline_ns is None or now_ns < wish.deadline_ns:
            return False
        self.timeouts_total += 1
        self.forget(request_id)
        return True

    def next_deadline_ns(self) -> int | None:
        """When the next request stops waiting, if none is answered before."""
        waits = (wish.deadline_ns for wish in self._wishes.values() if not wish.done)
        return min((deadline for deadline in waits if deadline is not None), default=None)

    def forget(self, request_id: RequestId) -> None:
        """The request waits no more. What is on its way for it and has not begun is called off."""
        wish = self._wishes.pop(request_id, None)
        if wish is None or wish.done:
            return
        wish.done = True
        tickets = sorted(wish.fetches) + ([wish.lookup] if wish.lookup is not None else [])
        self._outbox.commands += [Cancel(ticket) for ticket in tickets if ticket not in self._behind]

    # -------------------------------------------------------------------- lookup

    def _limit(self, wish: _Wish) -> int:
        """Blocks that the request could reuse."""
        return min((wish.num_tokens - 1) // self._block_size, len(wish.kv.keys))

    def _look(self, wish: _Wish) -> None:
        """Ask what the store has beyond what the host has; or wait for a fetch that brings that anyway."""
        keys, limit = wish.kv.keys, self._limit(wish)
        start = self._plan(wish.kv, wish.num_tokens).start
        if limit * self._block_size - start < self._policy.min_fetch_tokens:
            wish.done = True
            return
        # From where the host's end, not the device's: it must be able to go on from there.
        first = wish.first = self._host.tree.longest_cached(keys, limit)
        if first < limit and (ticket := self._coming.get(keys[first])) is not None:
            self._behind.setdefault(ticket, []).append(wish)
            return
        reach = self._reach(limit)
        swa_first = max(0, first - reach)
        swa = object_keys(self._namespace, Group.SWA, keys[swa_first:limit]) if self._window else []
        full = object_keys(self._namespace, Group.FULL, keys[first:limit])
        wish.lookup = self._outbox.new_ticket()
        self._lookups[wish.lookup] = wish
        self.lookups_total += 1
        self._outbox.commands.append(Lookup(wish.lookup, first, tuple(full), swa_first, tuple(swa), reach))

    def _reach(self, limit: int) -> int:
        """Blocks before the full hit in which a window is worth looking for: beyond, a rebuild is cheaper."""
        if self._window == 0:
            return 0
        rebuild = self._host.tree.rebuild_tokens
        return limit if rebuild is None else self._window + rebuild // self._block_size + 1

    def found(self, result: Found, now_ns: int) -> list[RequestId]:
        """A lookup was answered: choose and fetch. Requests that need not wait any longer."""
        wish = self._lookups.pop(result.ticket)
        wish.lookup = None
        if wish.done:
            return []
        self.found_objects_total += result.num_full + sum(result.swa)
        keys, limit = wish.kv.keys, self._limit(wish)
        have = self._host.tree.longest_cached(keys, limit)
        if have < limit and (ticket := self._coming.get(keys[have])) is not None:  # asked for since
            self._behind.setdefault(ticket, []).append(wish)
            return []
        if have >= wish.first:  # else what was asked for does not go on from what is left
            self._set_pin(wish, have)
            self._fetch(wish, result, have, now_ns)
        if wish.fetches:
            return []
        return self._end(wish)

    # --------------------------------------------------------------------- fetch

    def _fetch(self, wish: _Wish, found: Found, have: int, now_ns: int) -> None:
        """Choose a boundary as admission will, and fetch what it needs, if that saves enough."""
        now = self._plan(wish.kv, wish.num_tokens)
        end = max(have, min(wish.first + found.num_full, have + self._host.room(Group.FULL)))
        boundary = self._best_boundary(wish.kv.keys, found, end) if self._window else end
        then = plan_reuse(
            self._geometry,
            block_size=self._block_size,
            num_tokens=wish.num_tokens,
            num_full_blocks=max(end, now.num_full_blocks),
            num_safe_blocks=max(boundary, now.num_safe_blocks),
            allow_rebuild=self._host.tree.rebuild_tokens is not None,
        )
        if then.start - now.start < self._policy.min_fetch_tokens:
            return
        window = then.kind == "resume" and self._window > 0
        self._fetch_full(wish, have, boundary if window else end, now_ns)
        if window:
            self._fetch_window(wish, boundary, now_ns)

    def _best_boundary(self, keys: Sequence[BlockKey], found: Found, end: int) -> int:
        """Largest boundary up to `end` whose window host and store have between them; 0 if there is none within what
        was looked up."""
        run, boundary, lowest = 0, end, max(0, found.swa_first - self._window)
        for index in range(end - 1, lowest - 1, -1):
            node, place = self._host.tree.get(keys[index]), index - found.swa_first
            in_host = node is not None and node.swa_block != NO_BLOCK
            if in_host or (0 <= place < len(found.swa) and found.swa[place]):
                run += 1
                if run == self._window:
                    return boundary
            else:
                boundary, run = index, 0
        return boundary if lowest == 0 else 0

    def _fetch_full(self, wish: _Wish, first: int, end: int, now_ns: int) -> None:
        for begin in range(first, end, OBJECTS_PER_FETCH):
            indices = tuple(range(begin, min(begin + OBJECTS_PER_FETCH, end)))
            if not self._send(wish, Group.FULL, indices, 0, now_ns):
                return

    def _fetch_window(self, wish: _Wish, boundary: int, now_ns: int) -> None:
        keys, tree = wish.kv.keys, self._host.tree
        indices = []
        for index in range(max(0, boundary - self._window), boundary):
            node = tree.get(keys[index])
            if node is None or node.swa_block == NO_BLOCK:
                indices.append(index)
        self._send(wish, Group.SWA, tuple(indices), boundary, now_ns)

    def _send(self, wish: _Wish, group: Group, indices: tuple[int, ...], boundary: int, now_ns: int) -> bool:
        blocks = self._host.reserve(group, len(indices), now_ns)
        if blocks is None:
            return False
        ticket, keys = self._outbox.new_ticket(), wish.kv.keys
        self._pieces[ticket] = _Piece(wish, group, indices, tuple(blocks), boundary)
        wish.fetches[ticket] = None
        if group is Group.FULL:
            self._coming.update((keys[index], ticket) for index in indices)
        chosen = object_keys(self._namespace, group, [keys[index] for index in indices])
        groups = (group,) * len(indices)
        self._outbox.commands.append(Fetch(ticket, tuple(chosen), groups, tuple(blocks), wish.deadline_ns))
        return True

    def fetched(self, result: Fetched, now_ns: int) -> list[RequestId]:
        """A piece was answered: the host tier takes what is good of it. Requests that need not wait any longer."""
        wish = self._pieces[result.ticket].wish
        good = [outcome is Outcome.OK for outcome in result.outcomes]
        self.fetched_objects_total += sum(good)
        self.lost_objects_total += len(good) - sum(good)
        wish.fetches[result.ticket] = good
        ready: list[RequestId] = []
        for ticket, answered in list(wish.fetches.items()):
            if answered is None:
                break
            del wish.fetches[ticket]
            piece = self._pieces.pop(ticket)
            adopt = self._adopt_full if piece.group is Group.FULL else self._adopt_window
            adopt(piece, answered, now_ns)
            if not wish.fetches:
                ready += [] if wish.done else self._end(wish)
                self._set_pin(wish, 0)
            for other in self._behind.pop(ticket, []):
                if not other.done:
                    self._look(other)
                    ready += [other.kv.request_id] if other.done else []
        return ready

    def _adopt_full(self, piece: _Piece, good: Sequence[bool], now_ns: int) -> None:
        """Nodes for the leading good objects, if what they go on from is there."""
        kv, first = piece.wish.kv, piece.indices[0]
        for index in piece.indices:
            self._coming.pop(kv.keys[index], None)
        parent = self._host.tree.get(kv.keys[first - 1]) if first else None
        count = sum(takewhile(bool, good)) if parent is not None or first == 0 else 0
        for index, block in zip(piece.indices[:count], piece.blocks[:count], strict=True):
            parent = self._host.adopt(parent, kv.keys[index], block, now_ns)
            parent.stored_ns = max(parent.stored_ns, now_ns)
        self._host.give_back(Group.FULL, piece.blocks[count:])
        if count:
            self._set_pin(piece.wish, first + count)
            kv.fetched = (kv.fetched[0] if kv.fetched[1] == first else first, first + count)
            self.fetched_tokens_total += count * self._block_size

    def _adopt_window(self, piece: _Piece, good: Sequence[bool], now_ns: int) -> None:
        node = self._host.tree.get(piece.wish.kv.keys[piece.boundary - 1])
        filled = {i: b for i, b, ok in zip(piece.indices, piece.blocks, good, strict=True) if ok and node is not None}
        self._host.give_back(Group.SWA, [block for block in piece.blocks if block not in filled.values()])
        if node is not None:
            self._host.adopt_window(node, filled, now_ns)

    def _set_pin(self, wish: _Wish, upto: int) -> None:
        """Pin the host's path up to `upto` blocks for the wish, and no more what was pinned before."""
        node = self._host.tree.get(wish.kv.keys[upto - 1]) if upto else None
        before, wish.pin = wish.pin, self._host.pin(node) if node is not None else None
        if before is not None:
            self._host.unpin(before)

    def _end(self, wish: _Wish) -> list[RequestId]:
        wish.done = True
        if not wish.fetches:
            self._set_pin(wish, 0)
        return [wish.kv.request_id]

    def audit(self) -> list[str]:
        """All discrepancies."""
        waiting = {id(wish) for wishes in self._behind.values() for wish in wishes}
        faults = [
            f"store reads: {request_id} waits for nothing"
            for request_id, wish in self._wishes.items()
            if not wish.done and wish.lookup is None and not wish.fetches and id(wish) not in waiting
        ]
        for group in (Group.FULL, Group.SWA):
            held = sorted(b for piece in self._pieces.values() if piece.group is group for b in piece.blocks)
            if held != sorted(self._host.reserved(group)):
                faults.append(f"store reads: pieces hold {len(held)} blocks of {group.name}, reserved are others")
        return faults
