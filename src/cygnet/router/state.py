"""What router instances share, as an interface: prefixes, loads, leases, workers, and what was learned of texts.

Two implementations pass the same contract test (`tests/router/state_contract.py`): `LocalState`, for one router, and
`RedisState`, for any number of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from cygnet.router.scoring import Plan
from cygnet.router.view import Roster, WorkerRecord


class RouteRequest(Struct, frozen=True, gc=False):
    """A request to place. `chain` holds its block keys (8 bytes each), which cover `block_tokens` tokens each."""

    request_id: str
    chain: bytes
    tokens: int
    block_tokens: int
    plan: Plan
    chance: float
    """Uniform in [0, 1), for ties."""
    known: tuple[int, ...] = ()
    """What each candidate is known to spare of the prompt, in tokens, by what it told itself; -1: it tells nothing.
    Empty: nobody does."""
    known_blocks: int = 0
    """Beginning of `chain` about which `known` speaks. What was routed to a worker beyond it is still to be computed
    there, and counts as if it were."""
    waited: int = 0
    """Tokens that its wait in the queue makes up for."""
    late: bool = False
    """It has waited so long that a worker below its budget has room for it, however long it is."""
    look: bool = False
    """Only find the match: others wait, and their order decides who is placed. Answered with `NoRoom`."""


class Decision(Struct, frozen=True, gc=False):
    """A worker was chosen and its load raised by `cost`, until the lease named by the request id is released."""

    slot: int
    matched_tokens: int
    cost: int
    spilled: bool = False
    shared: bool = True
    """`False`: decided without the shared state, which could not be reached."""


class NoRoom(Struct, frozen=True, gc=False):
    """Every candidate is at its budget, or the best one is and worth waiting for. `matched_tokens`: the best match."""

    matched_tokens: int


Placed = Callable[[Decision | NoRoom], None]


class Lease(Struct, frozen=True, gc=False):
    """What a router holds for a request in flight."""

    request_id: str
    slot: int
    cost: int


class State(Protocol):
    """Shared state of a fleet of routers. Calls do not block; `then` is called once, maybe before `route` returns.

    The coroutines raise `StateUnavailableError` when the state can't be reached; the other calls never fail.
    """

    @property
    def reachable(self) -> bool:
        """Whether calls reach the state now."""
        ...

    def route(self, request: RouteRequest, then: Placed) -> None:
        """Longest match, choice, lease, load and insert in one atomic step. Never fails: see `Decision.shared`."""
        ...

    def settle(self, request_id: str, cost: int) -> None:
        """Lower what a request costs its worker, once its prefill is done."""
        ...

    def release(self, request_id: str) -> None:
        """End a request's lease. May be told twice."""
        ...

    def renew(self, leases: Sequence[Lease]) -> None:
        """Keep leases alive; those the state has lost are entered again. To be called well within the lease time."""
        ...

    def teach(self, learned: Mapping[bytes, bytes]) -> None:
        """Tell the other routers which cached blocks hold which prefixes of text (`learned.py`). May be lost."""
        ...

    async def taught(self) -> dict[bytes, bytes]:
        """What other routers have told since this was last asked, oldest first; at first, what is still kept of all
        that was ever told. It comes in parts: nothing more is there when it is empty.
        """
        ...

    async def join(self, record: WorkerRecord, ttl_s: float = 0) -> int | None:
        """Register a worker, for `ttl_s` seconds (0: until it leaves). Its slot, or `None` when all slots are taken."""
        ...

    async def leave(self, url: str) -> None:
        """Deregister a worker and forget what it held."""
        ...

    async def restart(self, url: str, slot: int) -> int | None:
        """Give a worker that lost its memory a new slot (see `SlotTable.restart`)."""
        ...

    async def roster(self) -> Roster:
        """All workers."""
        ...

    async def loads(self) -> dict[int, int]:
        """Pending tokens by slot, where there are any."""
        ...

    async def aclose(self) -> None:
        """Let go of connections."""
        ...
