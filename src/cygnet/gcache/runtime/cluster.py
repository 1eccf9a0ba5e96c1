"""What a server knows of its cluster, and which requests it therefore answers."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cygnet.base.errors import ConfigError
from cygnet.gcache.membership import Owners, State, View

VIEW_FILE = "view.json"
MAX_VIEW_BYTES = 1 << 20
FOR_EVER = float("inf")


class Cluster:
    """The view that this server has gone over to. Thread-safe.

    Without a name it is no cluster: the epoch is 0, and every request is answered. Otherwise a request is answered only
    in its own epoch, and only while the view says that this server is up. The view is kept in a file too, so that a
    server that restarts while nobody can be asked goes on with it (`resume`).

    With a `term_s` it is answered only that long after the view was last confirmed: after that the others may have
    given this server up.

    Invariants (`audit`): `epoch` never falls; the epochs of the requests that change something and are under way are
    none to come.
    """

    def __init__(
        self,
        name: str = "",
        server_id: str = "",
        folder: Path | None = None,
        *,
        term_s: float = FOR_EVER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._term_s = term_s
        self._clock = clock
        self._valid_until = FOR_EVER if term_s == FOR_EVER else -FOR_EVER
        self.server_id = server_id
        self._file = None if folder is None else folder / VIEW_FILE
        self._changed = threading.Condition()
        self._under_way: Counter[int] = Counter()
        self._answered = -1
        """The epoch whose requests are answered; none while the view does not list this server as up."""
        self._closed = False
        self.view = View(name)
        self.encoded = b""
        """The view, as it is sent."""
        self.owners: Owners | None = None
        self.answers_now: Callable[[int], None] = lambda epoch: None
        """Told of the epoch whose requests are answered, each time that changes; -1: none."""

    @property
    def epoch(self) -> int:
        """0: no cluster, or none yet."""
        return self.view.epoch

    @property
    def is_up(self) -> bool:
        """Whether the view lists this server as one to be asked."""
        return self._answered >= 0

    def adopt(self, view: View) -> bool:
        """Go over to `view` if it is newer. Requests of older epochs that are under way end as they began."""
        with self._changed:
            if view.cluster != self.name or view.epoch <= self.view.epoch or not view.placements:
                return False
            self._set(view)
        if self._file is not None:
            self._save()
        return True

    def resume(self) -> bool:
        """Go on with the view of an earlier run, if there is one in which this server is up; whether it is up."""
        if self._file is not None and not self.epoch:
            with suppress(OSError, ConfigError):  # then it must wait for the registry
                view = decode_view(self._file.read_bytes())
                me = view.server(self.server_id)
                if me is not None and me.state is not State.DOWN:
                    self.adopt(view)
        return self.is_up

    def adopt_encoded(self, data: bytes) -> bool:
        """The same for a view that someone has sent; not before this server has joined: it must see for itself first.

        Raises `ConfigError` for what is none.
        """
        view = decode_view(data)
        return self.epoch > 0 and self.adopt(view)

    def confirm(self, at: float) -> None:
        """At that time nobody had begun to count this server as gone; monotonic seconds."""
        self._valid_until = max(self._valid_until, at + self._term_s)

    @property
    def is_confirmed(self) -> bool:
        """Whether nobody can have given this server up, or it need not care."""
        return self._clock() < self._valid_until

    def answers(self, epoch: int) -> bool:
        """Whether a request of that epoch is answered."""
        return not self.name or (epoch == self._answered and self._clock() < self._valid_until)

    @contextmanager
    def changing(self, epoch: int) -> Iterator[bool]:
        """Around a request that stores or removes; `False`: it is not to be answered."""
        if not self.name:
            yield True
            return
        with self._changed:
            welcome = self.answers(epoch)
            if welcome:
                self._under_way[epoch] += 1
        try:
            yield welcome
        finally:
            if welcome:
                with self._changed:
                    self._under_way[epoch] -= 1
                    if not self._under_way[epoch]:
                        del self._under_way[epoch]
                        self._changed.notify_all()

    def wait_for_quiet(self, epoch: int, timeout_s: float) -> bool:
        """Until no request of an epoch before `epoch` changes anything any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(old < epoch for old in self._under_way), timeout_s)

    def wait_for_change(self, epoch: int, timeout_s: float) -> bool:
        """Until the view's epoch is another, or `close`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self.view.epoch != epoch, timeout_s)

    def close(self) -> None:
        """Whoever waits returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def audit(self) -> list[str]:
        """All discrepancies."""
        with self._changed:
            faults = self.view.audit()
            faults += [
                f"a request of epoch {epoch}, which is to come" for epoch in self._under_way if epoch > self.epoch
            ]
            if self.encoded and msgspec.json.decode(self.encoded, type=View) != self.view:
                faults.append("what is sent is not the view")
            return faults

    def _set(self, view: View) -> None:
        me = view.server(self.server_id)
        self._answered = -1
        self.answers_now(-1)
        self.view, self.encoded, self.owners = view, msgspec.json.encode(view), Owners(view)
        if me is not None and me.state is not State.DOWN:
            self._answered = view.epoch
            self.answers_now(view.epoch)
        self._changed.notify_all()

    def _save(self) -> None:
        """Best effort: it only matters when the registry can't be reached at the next start."""
        assert self._file is not None
        temporary = self._file.with_name(f"{VIEW_FILE}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}")
        try:
            temporary.write_bytes(self.encoded)
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)


def decode_view(data: bytes) -> View:
    """A view that was sent. Raises `ConfigError` for what is none, or one that contradicts itself."""
    if len(data) > MAX_VIEW_BYTES:
        raise ConfigError(f"a gcache cluster's view of {len(data)} bytes; at most {MAX_VIEW_BYTES} are taken")
    try:
        view = msgspec.json.decode(data, type=View)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"what was sent as a gcache cluster's view is none: {error}") from None
    faults = view.audit()
    if faults:
        raise ConfigError(f"a gcache cluster's view contradicts itself: {'; '.join(faults)}")
    return view
