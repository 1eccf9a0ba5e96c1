"""Keeps one server in its cluster: a sign of life in the registry, the view as it is there, and changes to it.

Any server makes the changes that are due, and the registry lets one of them through. While the registry can't be
reached nothing changes: the server goes on with the view that it has.
"""

import os
import threading
import time
from collections.abc import Callable

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import Absences, Server, State, View, advanced, joined, lost, must_be_empty
from cygnet.gcache.runtime.cluster import Cluster, decode_view
from cygnet.gcache.runtime.registry import Registry, RegistryError, Snapshot

VIEW = "view"
ALIVE = "alive/"
START_TIMEOUT_S = 30.0
RESUME_AFTER_S = 3.0
"""How long a start tries to reach the registry before it goes on with an earlier run's view."""
PAUSE_S = 0.5
"""After the registry could not be reached."""
CHANGE_TIMEOUT_S = 10.0


class Sign(msgspec.Struct, frozen=True):
    """A server's sign of life."""

    host: str
    port: int
    incarnation: str
    process: str
    """At random: a server that was restarted has another."""


class NameTakenError(ConfigError):
    """Another server has this one's name, and gives signs of life."""


class Agent:
    """Call `start`, and `close` at the end; one thread in between.

    `empty` gives up all that the server holds. It is called before the server joins a cluster that went on without it,
    while no request is answered.
    """

    def __init__(
        self,
        registry: Registry,
        cluster: Cluster,
        me: Server,
        *,
        empty: Callable[[], None],
        grace_s: float,
        ttl_s: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._registry = registry
        self._cluster = cluster
        self._me = me
        self._empty = empty
        self._ttl_s = ttl_s
        self._clock_ns = clock_ns
        self._sign = msgspec.json.encode(Sign(me.host, me.port, me.incarnation, os.urandom(8).hex()))
        self._lease = 0
        self._has_left = False
        """Whether this server had been drained when it was last listed."""
        self._absences = Absences(int(grace_s * 1e9))
        self._revision = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gcache-agent", daemon=True)
        self.problem = ""
        """Why the registry was of no use last time; empty: it was. While it is not, nobody's grace runs here."""
        self.looked_ns = clock_ns()
        """When the last look began. No absence counts from before that while there is a `problem`."""
        self.failures = 0

    def start(self) -> None:
        """Join. With a view of an earlier run in which this server is up the registry need not be reached.

        Raises `ConfigError`: it can't be reached, or another server has this one's name.
        """
        began = time.monotonic()
        while True:
            try:
                while self.step():
                    pass
                break
            except NameTakenError:
                if time.monotonic() >= began + 2 * self._ttl_s:  # it has not ended a moment ago
                    raise
            except RegistryError as error:
                waited = time.monotonic() - began
                if waited >= RESUME_AFTER_S and self._cluster.resume():
                    break
                if waited >= START_TIMEOUT_S:
                    raise ConfigError(f"gcache server {self._me.id!r} can't join its cluster: {error}") from None
            time.sleep(PAUSE_S)
        self._thread.start()

    def step(self) -> bool:
        """Look, and change what is due; `True`: look again at once. Raises `RegistryError` and `ConfigError`."""
        self.looked_ns = began_ns = self._clock_ns()
        snapshot = self._registry.read()
        self._revision = snapshot.revision
        stored = self._stored(snapshot)
        view = self._newest(stored)
        self._show_life(snapshot)
        self._cluster.adopt(view)
        self._cluster.confirm(began_ns / 1e9)
        mine = view.server(self._me.id)
        if mine is not None:
            self._has_left = mine.state is State.DRAINING and view.has_left(mine.id)
        elif self._has_left:
            return False  # it was emptied and taken off the list: it waits to be stopped
        if must_be_empty(view, self._me.id):
            # What is still being stored would be found after all.
            if not self._cluster.wait_for_quiet(self._cluster.epoch + 1, CHANGE_TIMEOUT_S):
                raise RegistryError("requests of an older view are still under way; this server can't be emptied yet")
            self._empty()
        view = joined(view, self._me)
        others = [s.id for s in view.servers if s.state is not State.DOWN and s.id != self._me.id]
        alive = {key.removeprefix(ALIVE) for key in snapshot.documents if key.startswith(ALIVE)}
        missing = self._absences.look(others, alive, self._clock_ns())
        left = [id_ for id_ in others if id_ not in alive and view.is_settled and view.has_left(id_)]
        for id_ in (*left, *missing):
            view = lost(view, id_)
        view = advanced(view)
        if view == stored:
            return False
        if self._write(snapshot, view):
            self._cluster.adopt(view)
        return True

    def try_step(self) -> bool | None:
        """`step`; `None` when the registry was of no use. What was missing may have been there meanwhile."""
        try:
            changed = self.step()
        except (RegistryError, ConfigError) as error:
            self._absences.blind()
            self.problem = str(error)
            self.failures += 1
            return None
        self.problem = ""
        return changed

    def change(self, change: Callable[[View], View], timeout_s: float = CHANGE_TIMEOUT_S) -> View:
        """Put `change(view)` in the view's place, and the next step after it; returns what is in the registry then.

        Raises `RegistryError`, and what `change` raises.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            snapshot = self._registry.read()
            stored = self._stored(snapshot)
            wanted = advanced(change(self._newest(stored)))
            if wanted == stored or self._write(snapshot, wanted):
                self._cluster.adopt(wanted)
                return wanted
        raise RegistryError("others keep changing the view; try again")

    def close(self) -> None:
        """End, and take the sign of life back: the grace begins at once, for a restart."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            if self._lease:
                self._registry.revoke(self._lease)
        except RegistryError:
            return  # it ends by itself

    # --- inside

    def _run(self) -> None:
        while not self._stop.is_set():
            changed = self.try_step()
            if changed is None:
                self._stop.wait(PAUSE_S)
            elif not changed:
                self._registry.wait(self._revision, self._ttl_s / 3)

    def _stored(self, snapshot: Snapshot) -> View:
        document = snapshot.documents.get(VIEW)
        return View(self._cluster.name) if document is None else decode_view(document.value)

    def _newest(self, stored: View) -> View:
        """The view in the registry, or the one that this server has had if the registry was set back."""
        return stored if stored.epoch >= self._cluster.epoch else self._cluster.view

    def _write(self, snapshot: Snapshot, view: View) -> bool:
        document = snapshot.documents.get(VIEW)
        expected = 0 if document is None else document.revision
        return self._registry.write(VIEW, msgspec.json.encode(view), expected=expected)

    def _show_life(self, snapshot: Snapshot) -> None:
        """Have a lease, and a document under it. Raises `ConfigError` when another server has this one's name."""
        held = bool(self._lease) and self._registry.refresh(self._lease)
        document = snapshot.documents.get(ALIVE + self._me.id)
        if document is not None and document.value == self._sign and held:
            return
        if document is not None and document.value != self._sign:
            other = _sign_of(document.value)
            # The same memory, or the same address: that process has ended, or this one would not have them.
            same = other.incarnation == self._me.incarnation or (other.host, other.port) == (
                self._me.host,
                self._me.port,
            )
            if not same:
                raise NameTakenError(
                    f"gcache server {self._me.id!r} runs at {other.host}:{other.port} already; choose another id"
                )
        if not held:
            self._lease = self._registry.grant(self._ttl_s)
        expected = 0 if document is None else document.revision
        self._registry.write(ALIVE + self._me.id, self._sign, expected=expected, lease=self._lease)


def _sign_of(document: bytes) -> Sign:
    try:
        return msgspec.json.decode(document, type=Sign)
    except msgspec.DecodeError as error:
        raise ConfigError(f"a sign of life in the registry can't be read: {error}") from None
