"""Who is in a cluster, and who owns what while that changes. Pure.

A cluster has one `View`, kept as one document in a registry (etcd) and copied to every server and client. Each change
is a function from view to view; whoever wants it writes the result if nobody was faster, and else tries again with what
is there now. So no server is special, and what a view says is agreed on.

Servers and *placements* change separately. A server joins, drains or is lost at once; placements follow in `advanced`,
one planned change at a time. A change puts the new placement before the old one, and everyone who holds an object that
is another's by the new placement moves it there. A view with one placement is *settled*. Until then

    reads    ask the owner by the newest placement, then the owners by the older ones
    puts     remove the object from the older owners, then store it with the newest
    moves    store with the newest owner unless it has something, then remove it

so of one key there is never an older value to be found where a newer one may be missing. Every request names the
view's epoch, and servers refuse those of another: nobody acts on an older placement once a server that matters has gone
over to a newer one.

A new server gets its share in steps (`RAMP`). A server that is lost keeps its share for a while (`Absences`): its
memory survives a restart, and nothing moves for an outage of seconds. Once it is `DOWN` others own its keys, so
whatever it holds may be out of date, and it comes back empty (`must_be_empty`).
"""

from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.gcache.placement import DEFAULT_WEIGHT, MAX_WEIGHT, Member, Placement

RAMP = (25, 50, 100)
"""Percent of its weight that a new server gets, step by step; it gets the next when the last has been moved to it."""
MAX_PLACEMENTS = 4
"""In one view."""
MAX_SERVERS = 1024
MAX_NAME_BYTES = 255


class State(StrEnum):
    """What a server is in its cluster."""

    JOINING = "joining"
    """It gets its share step by step."""
    ACTIVE = "active"
    DRAINING = "draining"
    """What it holds is moved to others; it gets nothing new."""
    DOWN = "down"
    """It was lost; nobody asks it."""


class Server(msgspec.Struct, frozen=True):
    """One server. `id` names it for ever, `incarnation` its memory, `address` where it is reached now."""

    id: str
    host: str
    port: int
    incarnation: str = ""
    group: str = ""
    weight: int = DEFAULT_WEIGHT
    state: State = State.JOINING
    percent: int = 0
    """Of its weight that placements give it."""

    @property
    def share(self) -> int:
        """Its weight in a placement made now."""
        if self.state is State.ACTIVE:
            return self.weight
        return -(-self.weight * self.percent // 100) if self.state is State.JOINING else 0


class View(msgspec.Struct, frozen=True):
    """A cluster at one epoch.

    Invariants (`audit`): ids are unique, and each of the newest placement is listed; there are 1 to `MAX_PLACEMENTS`
    placements once there is a server with a share, each other than the next, each with some weight; only servers that
    are not down have moved all (`done`), and nobody has in a settled view.
    """

    cluster: str
    epoch: int = 0
    """Rises with every change but one of `done`."""
    servers: tuple[Server, ...] = ()
    """By id."""
    placements: tuple[tuple[Member, ...], ...] = ()
    """Newest first."""
    done: tuple[str, ...] = ()
    """Servers that hold nothing any more that is another's by the newest placement."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being moved."""
        return len(self.placements) <= 1

    def server(self, id_: str) -> Server | None:
        """The server of that id."""
        return next((server for server in self.servers if server.id == id_), None)

    def has_left(self, id_: str) -> bool:
        """Whether a draining server has been emptied: it may be stopped."""
        server = self.server(id_)
        return server is None or (
            server.state is State.DRAINING and not any(_weight(placement, id_) for placement in self.placements)
        )

    def audit(self) -> list[str]:
        """All discrepancies."""
        faults = []
        ids = [server.id for server in self.servers]
        if ids != sorted(set(ids)):
            faults.append("servers are not in order, or one is listed twice")
        if len(self.placements) > MAX_PLACEMENTS:
            faults.append(f"{len(self.placements)} placements, at most {MAX_PLACEMENTS}")
        if not self.placements and any(server.share for server in self.servers):
            faults.append("servers with a share, but no placement")
        for placement in self.placements:
            if not placement or not all(member.weight for member in placement):
                faults.append("a placement without weight")
        for newer, older in zip(self.placements, self.placements[1:], strict=False):
            if newer == older:
                faults.append("the same placement twice")
        if self.placements and not {member.id for member in self.placements[0]} <= set(ids):
            faults.append("somebody who is not listed owns keys")
        up = {server.id for server in self.servers if server.state is not State.DOWN}
        if not set(self.done) <= up or list(self.done) != sorted(set(self.done)):
            faults.append("someone unknown or down has moved all")
        if self.done and self.is_settled:
            faults.append("someone has moved all, though nothing moves")
        for server in self.servers:
            if server.percent and server.state is not State.JOINING:
                faults.append(f"{server.id} is {server.state} at {server.percent} percent")
        return faults


class Owners:
    """Answers who owns a key by a view's placements. Immutable; O(points) to build, O(log points) to ask."""

    def __init__(self, view: View) -> None:
        down = {server.id for server in view.servers if server.state is State.DOWN}
        self._placements = [Placement(members, view.epoch) for members in view.placements]
        self._may_be_asked = {server.id for server in view.servers} - down

    def newest(self, key: bytes, place: int = 0) -> str:
        """Id of the server to put it to. `place`: of its root (`placement.root_place`), 0 for none."""
        return self._placements[0].owner_at(key, place)

    def older(self, key: bytes, place: int = 0) -> list[str]:
        """Ids of other servers that may still have it, the likeliest first."""
        newest = self.newest(key, place)
        owners = dict.fromkeys(placement.owner_at(key, place) for placement in self._placements[1:])
        return [owner for owner in owners if owner != newest and owner in self._may_be_asked]


# --- changes of servers


def must_be_empty(view: View, id_: str) -> bool:
    """Whether a server must give up all it holds before it may join: others may have changed it meanwhile."""
    server = view.server(id_)
    return view.epoch > 0 and (server is None or server.state is State.DOWN)


def joined(view: View, server: Server) -> View:
    """`server` serves now, with that address and incarnation. One that is known and not down keeps its state.

    Raises `ConfigError` for what can't be a server.
    """
    _check(server)
    known = view.server(server.id)
    if known is not None and known.state is not State.DOWN:
        kept = msgspec.structs.replace(server, state=known.state, percent=known.percent)
        return view if kept == known else _with(view, kept)
    if known is None and len(view.servers) >= MAX_SERVERS:
        raise ConfigError(f"gcache cluster {view.cluster!r} has {MAX_SERVERS} servers; it takes no more")
    return _with(view, msgspec.structs.replace(server, state=State.JOINING, percent=0))


def draining(view: View, id_: str) -> View:
    """Its objects are moved to the others. Raises `ConfigError` when there is no such server, or none to take them."""
    server = _listed(view, id_)
    if server.state is State.DRAINING:
        return view
    if server.state is State.DOWN:
        raise ConfigError(f"gcache server {id_!r} is down: there is nothing to drain")
    takers = (State.ACTIVE, State.JOINING)
    if not any(other.state in takers and other.weight for other in view.servers if other.id != id_):
        raise ConfigError(f"no other gcache server can take what {id_!r} holds; add one first")
    return _with(view, msgspec.structs.replace(server, state=State.DRAINING, percent=0))


def kept(view: View, id_: str) -> View:
    """A server that drains shall stay after all; it gets its share back step by step."""
    server = _listed(view, id_)
    if server.state is not State.DRAINING:
        return view
    return _with(view, msgspec.structs.replace(server, state=State.JOINING, percent=0))


def lost(view: View, id_: str) -> View:
    """It is gone for good: for too long, or as planned. One that had been drained is not listed any more."""
    server = view.server(id_)
    if server is None or server.state is State.DOWN:
        return view
    if view.is_settled and view.has_left(id_):
        return _raised(view, servers=tuple(other for other in view.servers if other.id != id_))
    return _with(view, msgspec.structs.replace(server, state=State.DOWN, percent=0))


def finished(view: View, id_: str, epoch: int) -> View:
    """The server has moved all that was another's by the view of that epoch."""
    server = view.server(id_)
    if server is None or server.state is State.DOWN or view.epoch != epoch or view.is_settled or id_ in view.done:
        return view
    return msgspec.structs.replace(view, done=tuple(sorted((*view.done, id_))))


# --- placements follow


def advanced(view: View) -> View:
    """The next step, if there is one to take: settle, or give placements the shape that the servers ask for."""
    up = {server.id for server in view.servers if server.state is not State.DOWN}
    if not view.is_settled:
        # Who had no share by any older placement holds nothing but what is its own.
        may_hold = {member.id for placement in view.placements[1:] for member in placement}
        if up & may_hold <= set(view.done):
            return _settled(view)
        left = tuple(member for member in view.placements[0] if member.id in up)
        if left == view.placements[0]:
            return view
        if not left:
            return _rescued(view)
        return _raised(view, placements=(left, *_behind(view)), done=())
    ramped = tuple(_ramped(server, first=not view.placements) for server in view.servers)
    target = tuple(Member(server.id, server.group, server.share) for server in ramped if server.share)
    if target and view.placements[:1] != (target,):
        return _raised(view, servers=ramped, placements=(target, *view.placements), done=())
    return view if ramped == view.servers else _raised(view, servers=ramped)


def _behind(view: View) -> tuple[tuple[Member, ...], ...]:
    """Placements to be kept behind one that lacks those of the newest who are down.

    The newest itself can be left out, for want of room: whoever is up owns by the other all that it owned by this.
    """
    return view.placements if len(view.placements) < MAX_PLACEMENTS else view.placements[1:]


def _rescued(view: View) -> View:
    """All who were to own the keys are lost in the middle of it: others own them at once; if there are none, those that
    are being drained, which are therefore kept."""
    able = [server for server in view.servers if server.state in (State.ACTIVE, State.JOINING)]
    able = able or [server for server in view.servers if server.state is State.DRAINING]
    if not able:
        return view
    ids = {server.id for server in able}
    servers = tuple(
        msgspec.structs.replace(server, state=State.ACTIVE, percent=0) if server.id in ids else server
        for server in view.servers
    )
    owners = tuple(Member(server.id, server.group, server.weight) for server in able)
    return _raised(view, servers=servers, placements=(owners, *_behind(view)), done=())


def _settled(view: View) -> View:
    """Everything has been moved. Who was lost for good is forgotten: should it return, it is new."""
    newest = view.placements[:1]
    servers = (server for server in view.servers if server.state is not State.DOWN or _weight(newest[0], server.id))
    return _raised(view, servers=tuple(servers), placements=newest, done=())


def _ramped(server: Server, *, first: bool) -> Server:
    """With its next share. The first servers of a cluster have it at once: there is nothing to move."""
    if server.state is not State.JOINING:
        return server
    if first or server.percent >= RAMP[-1]:
        return msgspec.structs.replace(server, state=State.ACTIVE, percent=0)
    return msgspec.structs.replace(server, percent=next(step for step in RAMP if step > server.percent))


def _weight(placement: Iterable[Member], id_: str) -> int:
    return next((member.weight for member in placement if member.id == id_), 0)


def _listed(view: View, id_: str) -> Server:
    server = view.server(id_)
    if server is None:
        known = ", ".join(server.id for server in view.servers) or "none"
        raise ConfigError(f"gcache cluster {view.cluster!r} has no server {id_!r}; it has {known}")
    return server


def _check(server: Server) -> None:
    if not 0 < len(server.id.encode()) <= MAX_NAME_BYTES or len(server.group.encode()) > MAX_NAME_BYTES:
        raise ConfigError(f"gcache server {server.id[:40]!r}: a name has 1 to {MAX_NAME_BYTES} bytes")
    if not 0 < server.weight <= MAX_WEIGHT:
        raise ConfigError(f"gcache server {server.id!r}: weight {server.weight} is not in 1..{MAX_WEIGHT}")
    if not server.host or not 0 < server.port < 1 << 16:
        raise ConfigError(f"gcache server {server.id!r}: {server.host}:{server.port} can't be reached")


def _with(view: View, server: Server) -> View:
    """`server` in place of the one of its id. A server that has changed may have something to move again."""
    others = [other for other in view.servers if other.id != server.id]
    done = tuple(id_ for id_ in view.done if id_ != server.id)
    return _raised(view, servers=tuple(sorted((*others, server), key=lambda each: each.id)), done=done)


def _raised(
    view: View,
    *,
    servers: tuple[Server, ...] | None = None,
    placements: tuple[tuple[Member, ...], ...] | None = None,
    done: tuple[str, ...] | None = None,
) -> View:
    """The view of the next epoch."""
    return View(
        view.cluster,
        view.epoch + 1,
        view.servers if servers is None else servers,
        view.placements if placements is None else placements,
        view.done if done is None else done,
    )


# --- short outages


class Absences:
    """Servers whose sign of life is missing, and since when. Times are monotonic nanoseconds.

    Invariants (`audit`): nobody is missing from a time that is still to come; nobody that was seen alive last time.
    """

    def __init__(self, grace_ns: int) -> None:
        self._grace_ns = grace_ns
        self._since: dict[str, int] = {}
        self._seen_ns = 0
        self._alive: frozenset[str] = frozenset()

    def look(self, listed: Iterable[str], alive: Collection[str], now_ns: int) -> list[str]:
        """Who of those `listed` has been missing for the whole grace."""
        self._seen_ns = now_ns
        self._alive = frozenset(alive)
        self._since = {id_: self._since.get(id_, now_ns) for id_ in listed if id_ not in self._alive}
        return [id_ for id_, since in self._since.items() if now_ns - since >= self._grace_ns]

    def blind(self) -> None:
        """The registry could not be read: what was missing may have been there, so everyone's grace begins anew."""
        self._since.clear()

    def audit(self) -> list[str]:
        """All discrepancies."""
        faults = [f"{id_} is missing from a time to come" for id_, at in self._since.items() if at > self._seen_ns]
        return faults + [f"{id_} is both missing and alive" for id_ in self._since if id_ in self._alive]
