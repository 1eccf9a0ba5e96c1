"""The state of a router that is alone: in this process, behind the interface that Redis has too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from cygnet.router.index import PrefixIndex
from cygnet.router.ladder import chain_length
from cygnet.router.ledger import Ledger
from cygnet.router.scoring import choose
from cygnet.router.slots import SlotTable
from cygnet.router.state import Decision, Lease, NoRoom, Placed, RouteRequest
from cygnet.router.view import Roster, WorkerRecord

NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Weighed:
    """Per candidate: tokens of the prompt that it holds, its pending tokens, and blocks of the chain that it holds."""

    matched: Sequence[int]
    loads: Sequence[int]
    depths: Sequence[int]


class LocalState:
    """`State` in memory. `clock` gives ns and never runs backwards.

    Invariants (`audit`): those of its three parts, and leases are on slots in use.
    """

    def __init__(self, clock: Callable[[], int], ttl_ns: int, lease_ns: int, max_entries: int) -> None:
        self._clock = clock
        self._lease_ns = lease_ns
        self._slots = SlotTable(quarantine=ttl_ns)
        self._ledger = Ledger()
        self.index = PrefixIndex(ttl_ns, max_entries)

    @property
    def reachable(self) -> bool:
        return True

    def route(self, request: RouteRequest, then: Placed) -> None:
        weighed = self.weigh(request)
        choice = None
        if not request.look:
            choice = choose(
                request.plan,
                request.tokens,
                weighed.matched,
                weighed.loads,
                request.chance,
                request.waited,
                request.late,
            )
        if choice is None:
            then(NoRoom(max(weighed.matched)))
        else:
            then(self.take(request, weighed, choice.place, spilled=choice.spilled))

    def weigh(self, request: RouteRequest) -> Weighed:
        """What a choice goes by: matched tokens and loads of the plan's candidates."""
        now = self._clock()
        self._ledger.reap(now)
        slots = [candidate.slot for candidate in request.plan.candidates]
        depths = self.index.match(request.chain, slots, now)
        matched = [min(depth * request.block_tokens, request.tokens) for depth in depths]
        if request.known:
            matched = [
                routed if told < 0 or depth > request.known_blocks else told
                for routed, told, depth in zip(matched, request.known, depths, strict=True)
            ]
        return Weighed(matched, [self._ledger.load(slot) for slot in slots], depths)

    def take(
        self, request: RouteRequest, weighed: Weighed, place: int, *, spilled: bool = False, whole: bool = False
    ) -> Decision:
        """Give the request to the candidate that was chosen by what was weighed just before. With `whole` it costs all
        of its tokens, whatever of them is there: on a worker that decodes all of them take room."""
        now = self._clock()
        slot = request.plan.candidates[place].slot
        spared = 0 if whole else weighed.matched[place]
        cost = request.tokens - spared + request.plan.request_tokens
        live = self._slots.live
        if live >> slot & 1:
            self._ledger.hold(request.request_id, slot, cost, now + self._lease_ns)
            if chain_length(request.chain):
                self.index.insert(request.chain, slot, weighed.depths[place], live, now)
        return Decision(slot, weighed.matched[place], cost, spilled)

    def settle(self, request_id: str, cost: int) -> None:
        self._ledger.settle(request_id, cost)

    def release(self, request_id: str) -> None:
        self._ledger.release(request_id)

    def renew(self, leases: Sequence[Lease]) -> None:
        expiry = self._clock() + self._lease_ns
        live = self._slots.live
        for lease in leases:
            if live >> lease.slot & 1:
                self._ledger.hold(lease.request_id, lease.slot, lease.cost, expiry)

    def teach(self, learned: Mapping[bytes, bytes]) -> None:
        return  # there is nobody else

    async def taught(self) -> dict[bytes, bytes]:
        return {}

    async def join(self, record: WorkerRecord, ttl_s: float = 0) -> int | None:
        now = self._clock()
        expires = now // NS_PER_MS + int(ttl_s * 1000) if ttl_s else 0
        return self._slots.join(replace(record, expires_at=expires), now)

    async def leave(self, url: str) -> None:
        slot = self._slots.leave(url, self._clock())
        if slot is not None:
            self._ledger.drop(slot)

    async def restart(self, url: str, slot: int) -> int | None:
        new = self._slots.restart(url, slot, self._clock())
        if new != slot:
            self._ledger.drop(slot)
        return new

    async def roster(self) -> Roster:
        for url in self._slots.expired(self._clock() // NS_PER_MS):
            await self.leave(url)
        return self._slots.roster

    async def loads(self) -> dict[int, int]:
        while self._ledger.reap(self._clock()):
            pass
        return self._ledger.loads()

    async def aclose(self) -> None:
        return

    def audit(self) -> list[str]:
        """Discrepancies of all parts."""
        stray = self._ledger.loads().keys() - self._slots.roster.workers.keys()
        found = [f"slot {slot} has a load and no worker" for slot in stray]
        return found + self._slots.audit() + self._ledger.audit() + self.index.audit()
