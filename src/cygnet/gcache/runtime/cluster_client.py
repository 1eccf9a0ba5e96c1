"""The client SDK for servers that come and go: a client whose placement follows its cluster's view.

Requests carry the view's epoch. A server with a newer view refuses and sends it; one with an older view is sent ours.
Then what is still open is asked for again. So no lookup service is on the way of any operation; the registry is asked
at the beginning, and when nobody else can be.

`gcache.membership` says what is asked in which order while objects are being moved.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import State, View
from cygnet.gcache.placement import Placement
from cygnet.gcache.protocol import Op
from cygnet.gcache.runtime.channel import Address, Peer, WrongEpochError
from cygnet.gcache.runtime.client import ANYWHERE, ClientOptions, GCacheClient, Lens, Means, Route, check_peer
from cygnet.gcache.runtime.cluster import decode_view
from cygnet.gcache.runtime.lanes import FAILURES
from cygnet.gcache.runtime.peer_in_epoch import Gone, PeerInEpoch, newer_view
from cygnet.gcache.runtime.views import View as ArenaView
from cygnet.kv.store import Outcome

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

MAX_ROUNDS = 8
"""How often an operation is begun anew because the view has changed."""
REFRESH_S = 2.0
"""How often a server is asked whether there is a newer view, for clients that are idle or whose servers are gone."""
REFRESH_TIMEOUT_S = 1.0
START_TIMEOUT_S = 10.0

Source = Callable[[float], View | None]
"""Where a view is had when no server is known or answers; given seconds. `None`: not there either."""


@dataclass
class _Epoch:
    """What a client knows at one epoch. `lenses` are clients of the same servers, the newest placement first."""

    view: View
    encoded: bytes
    peers: Mapping[str, Peer]
    """Of the servers that are up."""
    lenses: tuple[GCacheClient, ...]
    behind: set[str] = field(default_factory=set)
    """Servers that have refused because they have an older view."""
    num_told: int = 0
    """How many have been told this one since: whoever was refused meanwhile may ask again."""

    def older(
        self, keys: Sequence[bytes], places: Sequence[int], route: Route
    ) -> Iterator[tuple[GCacheClient, list[int]]]:
        """Which of these keys somebody else had by each of the older placements."""
        if len(self.lenses) == 1:
            return
        asked = {at: {self.lenses[0].placement.owner(keys[at], route.root, route.range_)} for at in places}
        for lens in self.lenses[1:]:
            some = []
            for at in places:
                owner = lens.placement.owner(keys[at], route.root, route.range_)
                if owner in self.peers and owner not in asked[at]:
                    asked[at].add(owner)
                    some.append(at)
            if some:
                yield lens, some


class ClusterClient(GCacheClient):
    """A `GCacheClient` of whatever servers its cluster has. `options.servers` may be empty.

    Raises `ConfigError` when `source` knows no view.
    """

    def __init__(self, options: ClientOptions, source: Source) -> None:
        self._source = source
        self._state_lock = threading.Lock()
        self._stop = threading.Event()
        self._pool: dict[tuple[str, str, int], Peer] = {}
        view = source(max(options.timeout_s, START_TIMEOUT_S))
        if view is None or not view.placements:
            raise ConfigError("no gcache server of the cluster can be found; is one running, and can etcd be reached?")
        self._means = Means.of(options)
        self.options = options
        self._now = self._at(view)
        super().__init__(options, self._now.lenses[0].lens)
        self._use(self._now)
        self._refresher = threading.Thread(target=self._refresh_forever, name="gcache-view", daemon=True)
        self._refresher.start()

    @property
    def cluster_view(self) -> View:
        """The view that it has."""
        return self._now.view

    def adopt(self, view: View) -> bool:
        """Go over to `view` if it is newer. Operations under way end with the one they began with, or begin anew."""
        with self._state_lock:
            if view.epoch <= self._now.view.epoch or view.cluster != self._now.view.cluster or not view.placements:
                return False
            self._now = self._at(view)
            self._use(self._now)
        return True

    # --- operations

    def batch_exists(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int] | None = None,
        *,
        touch: bool = False,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[bool]:
        deadline = self._deadline(timeout_s)

        def ask(lens: GCacheClient, some: list[int]) -> list[bool]:
            of_some = None if sizes is None else [sizes[at] for at in some]
            left = deadline - time.monotonic()
            return lens.batch_exists([keys[at] for at in some], of_some, touch=touch, timeout_s=left, route=route)

        return self._read(keys, route, ask, deadline, False, lambda there: there, lambda _: False)

    def batch_get_into(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[Outcome]:
        deadline = self._deadline(timeout_s)
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")

        def ask(lens: GCacheClient, some: list[int]) -> list[Outcome]:
            left = deadline - time.monotonic()
            return lens.batch_get_into(
                [keys[at] for at in some], [buffers[at] for at in some], timeout_s=left, route=route
            )

        return self._read(keys, route, ask, deadline, Outcome.FAILED, _is_ok, _has_failed)

    def get_into(
        self, key: bytes, buffer: "Buffer", *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> Outcome:
        deadline = self._deadline(timeout_s)

        def ask(lens: GCacheClient, some: list[int]) -> list[Outcome]:
            return [lens.get_into(key, buffer, timeout_s=deadline - time.monotonic(), route=route)]

        return self._read([key], route, ask, deadline, Outcome.FAILED, _is_ok, _has_failed)[0]

    def get(self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE) -> "bytearray | Outcome":
        deadline = self._deadline(timeout_s)

        def ask(lens: GCacheClient, some: list[int]) -> "list[bytearray | Outcome]":
            return [lens.get(key, timeout_s=deadline - time.monotonic(), route=route)]

        nothing: bytearray | Outcome = Outcome.FAILED
        return self._read([key], route, ask, deadline, nothing, _is_ok, _has_failed)[0]

    def batch_view(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> list[ArenaView | Outcome]:
        deadline = self._deadline(timeout_s)

        def ask(lens: GCacheClient, some: list[int]) -> list[ArenaView | Outcome]:
            return lens.batch_view([keys[at] for at in some], timeout_s=deadline - time.monotonic(), route=route)

        nothing: ArenaView | Outcome = Outcome.FAILED
        return self._read(keys, route, ask, deadline, nothing, _is_ok, _has_failed)

    def view(self, key: bytes, *, timeout_s: float | None = None, route: Route = ANYWHERE) -> ArenaView | Outcome:
        deadline = self._deadline(timeout_s)

        def ask(lens: GCacheClient, some: list[int]) -> list[ArenaView | Outcome]:
            return [lens.view(key, timeout_s=deadline - time.monotonic(), route=route)]

        nothing: ArenaView | Outcome = Outcome.FAILED
        return self._read([key], route, ask, deadline, nothing, _is_ok, _has_failed)[0]

    def batch_put(
        self,
        keys: Sequence[bytes],
        buffers: "Sequence[Buffer]",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> list[Outcome]:
        deadline = self._deadline(timeout_s)
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")

        def store(now: _Epoch, some: list[int]) -> list[Outcome]:
            removed = self._remove_from_older(now, keys, some, route, deadline)
            able = [at for at in some if removed[at] is not None]
            stored = now.lenses[0].batch_put(
                [keys[at] for at in able],
                [buffers[at] for at in able],
                ttl_ms=ttl_ms,
                timeout_s=deadline - time.monotonic(),
                route=route,
            )
            outcome_of = dict(zip(able, stored, strict=True))
            return [outcome_of.get(at, Outcome.FAILED) for at in some]

        return self._write(len(keys), store, deadline, Outcome.FAILED, _has_failed)

    def put(
        self,
        key: bytes,
        buffer: "Buffer",
        *,
        ttl_ms: int = 0,
        timeout_s: float | None = None,
        route: Route = ANYWHERE,
    ) -> Outcome:
        return self.batch_put([key], [buffer], ttl_ms=ttl_ms, timeout_s=timeout_s, route=route)[0]

    def try_remove(
        self, keys: Sequence[bytes], *, timeout_s: float | None = None, route: Route = ANYWHERE
    ) -> list[bool | None]:
        deadline = self._deadline(timeout_s)
        removed: set[int] = set()
        """From an older owner, in whichever round."""

        def remove(now: _Epoch, some: list[int]) -> list[bool | None]:
            older = self._remove_from_older(now, keys, some, route, deadline)
            removed.update(at for at, was in older.items() if was)
            left = deadline - time.monotonic()
            newest = now.lenses[0].try_remove([keys[at] for at in some], timeout_s=left, route=route)
            return [
                None if older[at] is None or there is None else at in removed or there
                for at, there in zip(some, newest, strict=True)
            ]

        return self._write(len(keys), remove, deadline, None, lambda there: there is None)

    def clear(self, namespace: bytes | None = None, *, timeout_s: float | None = None) -> int:
        deadline = self._deadline(timeout_s)
        count = super().clear(namespace, timeout_s=deadline - time.monotonic())
        if not self._now.view.is_settled:  # what was on its way from one server to another
            count += super().clear(namespace, timeout_s=deadline - time.monotonic())
        return count

    def check(self, *, timeout_s: float | None = None) -> None:
        """Reach any server: that others are gone for a while is nothing unusual. Raises `ConfigError`."""
        deadline = self._deadline(timeout_s)
        problem = ConfigError("no server of the gcache cluster is up")
        for name, peer in self._now.peers.items():
            try:
                check_peer(name, peer, deadline)
            except ConfigError as error:
                problem = error
                continue
            return
        raise problem

    def drain(self, id_: str, *, undo: bool = False, timeout_s: float | None = None) -> View:
        """Have a server's objects moved to the others, or let it stay after all; returns at once.

        Raises `ConfigError` when it can't be.
        """
        problem = "none is up"
        for peer in self._now.peers.values():
            try:
                with peer.channel(self._deadline(timeout_s)) as channel:
                    answer = channel.call(Op.DRAIN, id_.encode(), flags=int(undo))
            except FAILURES as error:
                problem = str(error)
                continue
            if answer.startswith(b"{"):
                self.adopt(decode_view(answer))
                return self._now.view
            raise ConfigError(answer.decode(errors="replace"))
        raise ConfigError(f"no gcache server takes the order: {problem}")

    def refresh(self) -> bool:
        """Ask for a newer view: the servers, and the registry when none answers. Whether there was one."""
        now = self._now
        for peer in sorted(now.peers.values(), key=lambda peer: peer.is_failing):
            try:
                view = newer_view(peer, now.view.epoch, REFRESH_TIMEOUT_S)
            except (*FAILURES, ConfigError):
                continue
            return view is not None and self.adopt(view)
        view = self._source(REFRESH_TIMEOUT_S)
        return view is not None and self.adopt(view)

    def close(self) -> None:
        self._stop.set()
        self._refresher.join()
        for peer in self._pool.values():
            peer.close()
        self._means.close(time.monotonic() + self.options.timeout_s)

    # --- inside

    def _read(
        self,
        keys: Sequence[bytes],
        route: Route,
        ask: Callable[[GCacheClient, list[int]], list[T]],
        deadline: float,
        nothing: T,
        is_found: Callable[[T], bool],
        has_failed: Callable[[T], bool],
    ) -> list[T]:
        """What the newest owner says of each key, or an older one."""
        answers = [nothing] * len(keys)
        left = list(range(len(keys)))

        def note(some: list[int], said: list[T]) -> list[int]:
            """Take answers in; what is still not found."""
            for at, answer in zip(some, said, strict=True):
                if is_found(answer) or not has_failed(answer) or has_failed(answers[at]):
                    answers[at] = answer
            return [at for at in some if not is_found(answers[at])]

        for _ in range(MAX_ROUNDS):
            now = self._now
            num_told = now.num_told
            missing = note(left, ask(now.lenses[0], left)) if left else []
            if missing and not now.view.is_settled:
                for lens, some in now.older(keys, missing, route):
                    note(some, ask(lens, some))
                missing = [at for at in missing if not is_found(answers[at])]
                if missing:  # they may have been moved between the two questions
                    missing = note(missing, ask(now.lenses[0], missing))
            left = missing
            if not left or not self._has_news(now, num_told, deadline):
                break
        return answers

    def _write(
        self,
        count: int,
        change: Callable[[_Epoch, list[int]], list[T]],
        deadline: float,
        nothing: T,
        has_failed: Callable[[T], bool],
    ) -> list[T]:
        """What becomes of each key when those that fail are tried again as long as the view changes."""
        answers = [nothing] * count
        left = list(range(count))
        for _ in range(MAX_ROUNDS):
            now = self._now
            num_told = now.num_told
            for at, answer in zip(left, change(now, left), strict=True):
                answers[at] = answer
            left = [at for at in left if has_failed(answers[at])]
            if not left or not self._has_news(now, num_told, deadline):
                break
        return answers

    def _remove_from_older(
        self, now: _Epoch, keys: Sequence[bytes], some: list[int], route: Route, deadline: float
    ) -> dict[int, bool | None]:
        """Whether each was there; `None`: one of those who may have it did not answer."""
        there: dict[int, bool | None] = dict.fromkeys(some, False)
        for lens, places in now.older(keys, some, route):
            left = deadline - time.monotonic()
            removed = lens.try_remove([keys[at] for at in places], timeout_s=left, route=route)
            for at, was in zip(places, removed, strict=True):
                before = there[at]
                there[at] = None if was is None or before is None else was or before
        return there

    def _has_news(self, before: _Epoch, num_told: int, deadline: float) -> bool:
        """Whether it is worth asking again: the view is another now, or a server was told it since `num_told`."""
        if time.monotonic() >= deadline:
            return False
        for id_ in list(before.behind):
            try:
                with before.peers[id_].channel(deadline) as channel:
                    channel.call(Op.ADOPT, before.encoded)
            except FAILURES:
                continue
            before.behind.discard(id_)
            before.num_told += 1
        return before.num_told != num_told or self._now is not before

    def _refused(self, peer: Peer, error: WrongEpochError) -> None:
        """A server is in another epoch: its view is adopted, or it is to be told ours."""
        now = self._now
        if error.epoch < now.view.epoch:
            if now.peers.get(peer.address.name) is peer:
                now.behind.add(peer.address.name)
            return
        try:
            self.adopt(decode_view(error.view))
        except ConfigError:
            return  # it talks nonsense: a failure like others

    def _at(self, view: View) -> _Epoch:
        """Clients for each placement of a view, over connections that are shared by all views."""
        peers: dict[str, Peer] = {}
        for server in view.servers:
            if server.state is State.DOWN:
                continue
            where = (server.id, server.host, server.port)
            if where not in self._pool:
                address = Address(server.host, server.port, server.id, server.group)
                self._pool[where] = self._means.peer(address, self.options)
            peers[server.id] = self._pool[where]
        for where in [
            where for where in self._pool if where[0] not in peers or peers[where[0]] is not self._pool[where]
        ]:
            self._pool.pop(where).close()
        asked: dict[str, object] = {server.id: Gone() for server in view.servers}
        asked |= {member.id: Gone() for placement in view.placements for member in placement}
        asked |= {id_: PeerInEpoch(peer, view.epoch, self._refused) for id_, peer in peers.items()}
        lenses = tuple(
            GCacheClient(
                self.options,
                Lens(Placement(placement, view.epoch), cast("dict[str, Peer]", asked), self._means),
            )
            for placement in view.placements
        )
        return _Epoch(view, msgspec.json.encode(view), peers, lenses)

    def _use(self, now: _Epoch) -> None:
        """For what is asked of all servers."""
        self.placement, self._peers = now.lenses[0].placement, dict(now.peers)

    def _refresh_forever(self) -> None:
        while not self._stop.wait(REFRESH_S):
            self.refresh()


def _is_ok(answer: object) -> bool:
    """Whether an object was had, in whatever form."""
    return answer is Outcome.OK or not isinstance(answer, Outcome)


def _has_failed(answer: object) -> bool:
    """Whether it is not known if there is an object."""
    return answer in (Outcome.FAILED, Outcome.TIMED_OUT)
