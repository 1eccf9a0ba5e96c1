"""The client SDK, synchronous: batches of objects over any number of servers, into and out of the caller's memory."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.gcache.limits import FLAGS_PER_FRAME, MAX_FRAME_BYTES
from cygnet.gcache.placement import Member, Placement, root_place
from cygnet.gcache.protocol import ANY, EVERYTHING, TOUCH, Op, Want, pack_keys, pack_wants, unpack_flags
from cygnet.gcache.record import CHUNK_BYTES, is_full_key
from cygnet.gcache.runtime.affinity import keep_threads_to
from cygnet.gcache.runtime.channel import Address, GCacheError, Peer
from cygnet.gcache.runtime.compiled import compiled_core
from cygnet.gcache.runtime.lanes import (
    FAILURES,
    Frame,
    GetFrame,
    Lane,
    Part,
    PutFrame,
    Result,
    copy_all,
    cut,
    lanes_of,
    view_all,
    view_one,
)
from cygnet.gcache.runtime.single import get_one, get_whole, put_one
from cygnet.gcache.runtime.small import SmallGets, SmallPuts, small_and_large
from cygnet.gcache.runtime.views import View
from cygnet.gcache.runtime.watchdog import Watchdog
from cygnet.gcache.runtime.wire import DeadlineError
from cygnet.kv.runtime.disk_store.team import Team
from cygnet.kv.store import Outcome

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


@dataclass(frozen=True)
class ClientOptions:
    """How servers are talked to."""

    servers: tuple[Address, ...] = field(default_factory=tuple)
    etcd: str = ""
    cluster: str = "default"
    """Instead of servers: endpoints of the etcd that knows a cluster, and its name there (`connect`)."""
    token: str = ""
    timeout_s: float = 1.0
    """For a call that is not given another time: all of it, over all servers."""
    connections: int = 4
    """Per server, at most."""
    window: int = 2
    """Frames on the way per connection."""
    slice_bytes: int = CHUNK_BYTES
    """Of a value per frame, a multiple of 1 MiB."""
    io_threads: int = 8
    """Beside the caller's own."""
    cpus: str = ""
    """Where these run (`affinity.parse_cpus`); empty: where the caller may."""
    same_host: bool = True
    """Read the arena of a server on this machine directly, where this user may."""
    verify: bool = True
    """Check what came over a network against its checksums."""
    max_value_bytes: int = 1 << 30
    """Largest object that `get` makes room for."""
    epoch: int = 0
    compiled: bool = True
    """Use the compiled core, where there is one (`compiled`)."""


@dataclass(frozen=True)
class Route:
    """What a batch belongs to, for placement: session or prefix, and range of it (`placement.range_of`)."""

    root: bytes = b""
    range_: int = 0


ANYWHERE = Route()


@dataclass(frozen=True)
class Means:
    """Threads that clients of the same servers share."""

    team: Team
    watchdog: Watchdog

    @classmethod
    def of(cls, options: ClientOptions) -> "Means":
        """As many as the options say. Raises `ConfigError`."""
        begin = keep_threads_to(options.cpus) if options.cpus else bool
        return cls(Team(options.io_threads, "gcache-io", begin), Watchdog("gcache-deadlines"))

    def peer(self, server: Address, options: ClientOptions) -> Peer:
        """Connections to a server, which are watched here."""
        return Peer(
            server,
            token=options.token,
            max_connections=options.connections,
            same_host=options.same_host,
            epoch=options.epoch,
            watchdog=self.watchdog,
            core=compiled_core(options.compiled),
        )

    def close(self, deadline: float) -> None:
        """End the threads."""
        self.team.close(deadline)
        self.watchdog.close()


@dataclass(frozen=True)
class Lens:
    """Who a client asks for which key, when that is not for it to decide."""

    placement: Placement
    peers: dict[str, Peer]
    means: Means


class GCacheClient:
    """Thread-safe. Calls end by their deadline; a server that is dead, frozen or slow costs misses, never errors.

    Keys are full keys (`record.full_key`); anything else is a `ValueError`, as are buffers that are not contiguous
    memory. Buffers are not touched once a call has returned. An outcome is `TIMED_OUT` where the deadline passed,
    `FAILED` where a server failed, or has lately and is left alone.
    """

    def __init__(self, options: ClientOptions, lens: Lens | None = None) -> None:
        if not options.servers and lens is None:
            raise ConfigError("no gcache server is named; write for example gcache://127.0.0.1:7400")
        if not 0 < options.slice_bytes <= MAX_FRAME_BYTES or options.slice_bytes % CHUNK_BYTES:
            raise ConfigError(f"gcache slices of {options.slice_bytes} bytes; choose a multiple of 1MiB up to 1GiB")
        if options.connections < 1 or options.window < 1 or options.io_threads < 0:
            raise ConfigError("gcache clients need at least one connection per server, and a window of at least 1")
        self.options = options
        if lens is None:
            members = (Member(server.name, server.group, server.weight) for server in options.servers)
            means = Means.of(options)
            peers = {server.name: means.peer(server, options) for server in options.servers}
            lens = Lens(Placement(members, options.epoch), peers, means)
        self.lens = lens
        self.placement, self._peers, self._team = lens.placement, lens.peers, lens.means.team

    # --- many objects

    def batch_exists(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int] | None = None,
        *,
        touch: bool = False,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[bool]:
        """Whether each object (of that size) is there; one round trip per server. What can't be found out is not."""
        deadline = self._deadline(timeout_s)
        wants = [Want(key, ANY if sizes is None else sizes[at]) for at, key in enumerate(_checked(keys))]

        def ask(peer: Peer, some: list[int]) -> list[bool]:
            flags = TOUCH if touch else 0
            found = _flags(peer, Op.EXISTS, [wants[at] for at in some], pack_wants, flags, deadline)
            return [there is True for there in found]

        return self._per_peer(keys, route, ask, False)

    def batch_get_into(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[Outcome]:
        """Fill each buffer with its object, of exactly that size."""
        deadline = self._deadline(timeout_s)
        views = _views(_checked(keys), buffers, writable=True)
        results: dict[int, Result] = {}
        outcomes: list[Outcome | None] = [None] * len(keys)
        torn: list[int] = []
        verify = self.options.verify

        def frames(places: list[int]) -> "deque[Frame]":
            left = [at for at in places if outcomes[at] is None]
            small, large = self._by_size(views, left)
            cuts = (SmallGets(keys, views, some, outcomes, torn, verify=verify) for some in small)
            return deque([*cuts, *(GetFrame(part, verify) for part in self._cut(keys, views, large, results))])

        def copy(peer: Peer, places: list[int]) -> None:
            self._copy(peer, places, keys, views, outcomes, deadline)
            Lane(peer, frames(places), self.options.window, deadline).run()

        tasks: list[Callable[[], None]] = []
        for peer, places in self._shares(keys, route):
            if peer.may_be_local:
                tasks.append(partial(copy, peer, places))
            else:
                most = self._lanes_for(views, places)
                tasks += [lane.run for lane in lanes_of(peer, frames(places), self.options.window, deadline, most)]
        self._team.run(tasks, _call, deadline)
        torn += [at for at, result in results.items() if result.torn_here]
        if torn:  # what arrived damaged is not to be found again
            self.remove([keys[at] for at in torn], timeout_s=deadline - time.monotonic(), route=route)
        return _outcomes(outcomes, results)

    def batch_put(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[Outcome]:
        """Store each object, instead of what is there. `OK`: it is found from now on; otherwise it is not."""
        deadline = self._deadline(timeout_s)
        views = _views(_checked(keys), buffers, writable=False)
        results: dict[int, Result] = {}
        outcomes: list[Outcome | None] = [None] * len(keys)
        root = root_place(route.root, route.range_) if route.root else 0
        lanes: list[Lane] = []
        for peer, places in self._shares(keys, route):
            small, large = self._by_size(views, places)
            cuts = (SmallPuts(keys, views, some, outcomes, ttl_ms, root) for some in small)
            parts = self._cut(keys, views, large, results)
            frames: deque[Frame] = deque([*cuts, *(PutFrame(part, ttl_ms, root) for part in parts)])
            lanes += lanes_of(peer, frames, self.options.window, deadline, self._lanes_for(views, places))
        self._team.run(lanes, Lane.run, deadline)
        return _outcomes(outcomes, results)

    def batch_view(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> list[View | Outcome]:
        """Objects of servers on this machine, in place. `FAILED` for others' objects, and when too much is leased."""
        deadline = self._deadline(timeout_s)

        def ask(peer: Peer, some: list[int]) -> list[View | Outcome]:
            if not peer.is_local(deadline):
                return [Outcome.FAILED] * len(some)
            return view_all(peer, [Want(keys[at]) for at in some], deadline)

        return self._per_peer(_checked(keys), route, ask, Outcome.FAILED)

    def remove(self, keys: Sequence[bytes], *, timeout_s: float | None = None, route: Route = ANYWHERE) -> list[bool]:
        """Give up these objects; whether each was there. What is not done by the deadline counts as not there."""
        return [there is True for there in self.try_remove(keys, timeout_s=timeout_s, route=route)]

    def try_remove(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> list[bool | None]:
        """The same, but `None` where that is not known: it may still be there."""
        deadline = self._deadline(timeout_s)

        def ask(peer: Peer, some: list[int]) -> list[bool | None]:
            return _flags(peer, Op.DELETE, [keys[at] for at in some], pack_keys, 0, deadline)

        return self._per_peer(_checked(keys), route, ask, None)

    # --- one object

    def exists(self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE) -> bool:
        """Whether it is there."""
        return self.batch_exists([key], timeout_s=timeout_s, route=route)[0]

    def get_into(
        self, key: bytes, buffer: "Buffer", *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> Outcome:
        """Fill `buffer` with the object, of exactly that size."""
        view = _views(_checked([key]), [buffer], writable=True)[0]
        if not 0 < len(view) <= CHUNK_BYTES:
            return self.batch_get_into([key], [view], timeout_s=timeout_s, route=route)[0]
        deadline = self._deadline(timeout_s)
        peer = self._peers[self.placement.owner(key, route.root, route.range_)]
        outcome = get_one(peer, key, view, deadline, verify=self.options.verify)
        if outcome is Outcome.TORN:
            self.remove([key], timeout_s=deadline - time.monotonic(), route=route)
        return outcome

    def get(self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE) -> "bytearray | Outcome":
        """The object, of whatever size, in memory of its own; otherwise why not."""
        deadline = self._deadline(timeout_s)
        _checked([key])
        peer = self._peers[self.placement.owner(key, route.root, route.range_)]
        begun = get_whole(peer, key, deadline, self.options.max_value_bytes, verify=self.options.verify)
        if isinstance(begun, Outcome) or len(begun) <= CHUNK_BYTES:
            return begun
        rest = self.batch_get_into([key], [begun], timeout_s=deadline - time.monotonic(), route=route)[0]
        return begun if rest is Outcome.OK else rest

    def put(
        self,
        key: bytes,
        buffer: "Buffer",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> Outcome:
        """Store an object, instead of what is there."""
        view = _views(_checked([key]), [buffer], writable=False)[0]
        if not 0 < len(view) <= CHUNK_BYTES:
            return self.batch_put([key], [view], ttl_ms=ttl_ms, timeout_s=timeout_s, route=route)[0]
        deadline = self._deadline(timeout_s)
        peer = self._peers[self.placement.owner(key, route.root, route.range_)]
        root = root_place(route.root, route.range_) if route.root else 0
        return put_one(peer, key, view, ttl_ms, root, deadline)

    def view(self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE) -> View | Outcome:
        """The object in place, if its server is on this machine."""
        deadline = self._deadline(timeout_s)
        _checked([key])
        peer = self._peers[self.placement.owner(key, route.root, route.range_)]
        try:
            return view_one(peer, key, deadline) if peer.is_local(deadline) else Outcome.FAILED
        except FAILURES as error:
            return Outcome.TIMED_OUT if isinstance(error, DeadlineError) else Outcome.FAILED

    # --- servers

    def clear(self, namespace: bytes | None = None, *, timeout_s: float | None = None) -> int:
        """Give up all objects of a namespace, or all, on all servers that answer; how many there were."""
        flags = EVERYTHING if namespace is None else 0
        answers = self._ask_all(Op.CLEAR, namespace or b"", flags, self._deadline(timeout_s))
        return sum(int.from_bytes(answer, "little") for answer in answers.values())

    def stats(self, *, timeout_s: float | None = None) -> dict[str, dict[str, object]]:
        """What each server that answers says of itself, by id."""
        answers = self._ask_all(Op.STAT, b"", 0, self._deadline(timeout_s))
        return {name: msgspec.json.decode(answer, type=dict[str, object]) for name, answer in answers.items()}

    def audit(self, *, timeout_s: float | None = None) -> list[str]:
        """All discrepancies of all servers that answer."""
        answers = self._ask_all(Op.AUDIT, b"", 0, self._deadline(timeout_s))
        return [
            f"{name}: {fault}"
            for name, answer in answers.items()
            for fault in msgspec.json.decode(answer, type=list[str])
        ]

    def check(self, *, timeout_s: float | None = None) -> None:
        """Reach every server. Raises `ConfigError` that says which one can't be, and why."""
        deadline = self._deadline(timeout_s)
        for name, peer in self._peers.items():
            check_peer(name, peer, deadline)

    def close(self) -> None:
        """Close all connections and end the threads. Calls afterwards fail."""
        for peer in self._peers.values():
            peer.close()
        self.lens.means.close(time.monotonic() + self.options.timeout_s)

    # --- inside

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _shares(self, keys: Sequence[bytes], route: Route) -> list[tuple[Peer, list[int]]]:
        """Which keys, by their place in the batch, go to which server; servers that have failed lately come last."""
        if len(self._peers) == 1:
            return [(next(iter(self._peers.values())), list(range(len(keys))))] if keys else []
        shares: dict[str, list[int]] = {}
        for at, key in enumerate(keys):
            shares.setdefault(self.placement.owner(key, route.root, route.range_), []).append(at)
        return sorted(((self._peers[name], places) for name, places in shares.items()), key=lambda s: s[0].is_failing)

    def _per_peer(
        self, keys: Sequence[bytes], route: Route, ask: Callable[[Peer, list[int]], list[T]], otherwise: T
    ) -> list[T]:
        """What `ask` says for each server's share, `otherwise` where that fails. Servers are asked at once."""
        answers = [otherwise] * len(keys)

        def one(share: tuple[Peer, list[int]]) -> None:
            try:
                found = ask(*share)
            except FAILURES:
                return
            for at, answer in zip(share[1], found, strict=True):
                answers[at] = answer

        self._run_tasks(self._shares(keys, route), one)
        return answers

    def _ask_all(self, op: Op, meta: bytes, flags: int, deadline: float) -> dict[str, bytes]:
        answers: dict[str, bytes] = {}

        def one(item: tuple[str, Peer]) -> None:
            try:
                with item[1].channel(deadline) as channel:
                    answers[item[0]] = channel.call(op, meta, flags=flags)
            except FAILURES:
                return

        self._run_tasks(list(self._peers.items()), one)
        return answers

    def _run_tasks(self, tasks: Iterable[T], work: Callable[[T], None]) -> None:
        # Each task keeps to the deadline by itself; none is left out, so that its failure is told apart.
        self._team.run(list(tasks), work, float("inf"))

    def _copy(
        self,
        peer: Peer,
        places: list[int],
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        outcomes: list[Outcome | None],
        deadline: float,
    ) -> None:
        """Copy from a local server's arena; what fails is left, to be asked for over TCP."""
        try:
            if not peer.is_local(deadline):
                return
            found = copy_all(peer, [keys[at] for at in places], [views[at] for at in places], deadline)
        except FAILURES:
            return
        for at, outcome in zip(places, found, strict=True):
            outcomes[at] = None if outcome is Outcome.FAILED else outcome

    def _by_size(self, views: Sequence[memoryview], places: list[int]) -> tuple[list[list[int]], list[int]]:
        """Which places share frames of small objects, and which are cut as large ones are."""
        if len(places) == 1 or compiled_core(self.options.compiled) is None:
            return [], places
        return small_and_large(views, places)

    def _cut(
        self, keys: Sequence[bytes], views: Sequence[memoryview], places: list[int], results: dict[int, Result]
    ) -> Iterator[list[Part]]:
        own = {at: Result() for at in places}
        results |= own
        return cut(
            [keys[at] for at in places], [views[at] for at in places], list(own.values()), self.options.slice_bytes
        )

    def _lanes_for(self, views: Sequence[memoryview], places: list[int]) -> int:
        """Most connections that are worth their threads."""
        return -(-sum([len(views[at]) for at in places]) // self.options.slice_bytes)


def check_peer(name: str, peer: Peer, deadline: float) -> None:
    """Reach a server. Raises `ConfigError` that says why it can't be."""
    try:
        with peer.channel(deadline) as channel:
            channel.call(Op.PING)
    except GCacheError as error:
        raise ConfigError(f"{error} ({name}); set CYGNET_GCACHE_TOKEN if it wants a token") from None
    except FAILURES as error:
        raise ConfigError(f"gcache server {name} does not answer ({error}); is it running there?") from None


def _flags(
    peer: Peer, op: Op, items: Sequence[T], pack: Callable[[Sequence[T]], bytes], flags: int, deadline: float
) -> list[bool | None]:
    """What a server says of each item, in as many frames as it takes."""
    answers: list[bool | None] = []
    with peer.channel(deadline) as channel:
        for first in range(0, len(items), FLAGS_PER_FRAME):
            some = items[first : first + FLAGS_PER_FRAME]
            answers += unpack_flags(channel.call(op, pack(some), count=len(some), flags=flags), len(some))
    return answers


def _outcomes(outcomes: list[Outcome | None], results: dict[int, Result]) -> list[Outcome]:
    """What became of each object: as it was put there, or as its slices have ended."""
    late = Outcome.TIMED_OUT  # nobody has come to it
    return [own or (results[at].outcome if at in results else late) for at, own in enumerate(outcomes)]


def _call(task: Callable[[], None]) -> None:
    task()


def _checked(keys: Sequence[bytes]) -> Sequence[bytes]:
    for key in keys:
        if not is_full_key(key):
            raise ValueError(f"{key[:40]!r} is no full key; make it with full_key()")
    return keys


def _views(keys: Sequence[bytes], buffers: "Sequence[Buffer]", *, writable: bool) -> list[memoryview]:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
    views = [memoryview(buffer) for buffer in buffers]
    if not all(view.c_contiguous for view in views):
        raise ValueError("an object is one contiguous piece of memory")
    if writable and any(view.readonly for view in views):
        raise ValueError("objects are read into writable buffers")
    return [
        view if view.format == "B" and view.ndim == 1 else view.cast("B") if view.nbytes else memoryview(b"")
        for view in views
    ]
