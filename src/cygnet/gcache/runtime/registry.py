"""Where a cluster keeps what it agrees on: a few documents with revisions, and leases that end by themselves."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cygnet.base.errors import CygnetError

MAX_DOCUMENT_BYTES = 1 << 20


class RegistryError(CygnetError):
    """The registry can't be reached now, or refuses. What was asked for may have been done or not."""


@dataclass(frozen=True)
class Document:
    """One value. `revision` is that of the change which wrote it."""

    value: bytes
    revision: int


@dataclass(frozen=True)
class Snapshot:
    """All documents at one revision, which rises with every change."""

    revision: int
    documents: dict[str, Document]


class Registry(Protocol):
    """Thread-safe. All but `wait` raise `RegistryError`, within a bounded time.

    Writes are conditional: `expected` is the revision of the document that is to be replaced, 0 for none. Whoever is
    told `False` reads again. A document written with a lease is gone when the lease is.
    """

    def read(self) -> Snapshot:
        """Everything there is, not older than what anyone has written before."""

    def write(self, key: str, value: bytes, *, expected: int, lease: int = 0) -> bool:
        """Write if nobody else has meanwhile. Raises for a lease that is over."""

    def remove(self, key: str, *, expected: int) -> bool:
        """Remove if nobody else has changed it."""

    def grant(self, ttl_s: int) -> int:
        """A lease, which lasts so long (at least) after its last `refresh`."""

    def refresh(self, lease: int) -> bool:
        """`False`: it is over."""

    def revoke(self, lease: int) -> None:
        """End it, and its documents. Not an error when it is over."""

    def wait(self, after: int, timeout_s: float) -> bool:
        """Return when something has changed after that revision (`True`), or time is over. Never raises.

        A `False` says nothing for sure: whoever must know reads.
        """


class LocalRegistry:
    """A registry in this process, for a cluster of servers that are one process, and for tests.

    Invariants (`audit`): no document is of a lease that is over or of a revision to come.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._revision = 0
        self._documents: dict[str, tuple[Document, int]] = {}
        self._leases: dict[int, tuple[int, float]] = {}
        """Lease -> how long it lasts, and until when."""
        self._last_lease = 0

    def read(self) -> Snapshot:
        with self._changed:
            self._expire()
            return Snapshot(self._revision, {key: document for key, (document, _) in self._documents.items()})

    def write(self, key: str, value: bytes, *, expected: int, lease: int = 0) -> bool:
        if len(value) > MAX_DOCUMENT_BYTES:
            raise RegistryError(f"a document of {len(value)} bytes, at most {MAX_DOCUMENT_BYTES}")
        with self._changed:
            self._expire()
            if not self._is(key, expected):
                return False
            if lease and lease not in self._leases:
                raise RegistryError("the lease is over")
            self._revision += 1
            self._documents[key] = Document(value, self._revision), lease
            self._changed.notify_all()
            return True

    def remove(self, key: str, *, expected: int) -> bool:
        with self._changed:
            self._expire()
            if not expected or not self._is(key, expected):
                return False
            self._drop([key])
            return True

    def grant(self, ttl_s: int) -> int:
        with self._changed:
            self._last_lease += 1
            self._leases[self._last_lease] = ttl_s, self._clock() + ttl_s
            return self._last_lease

    def refresh(self, lease: int) -> bool:
        with self._changed:
            self._expire()
            if lease not in self._leases:
                return False
            ttl_s, _ = self._leases[lease]
            self._leases[lease] = ttl_s, self._clock() + ttl_s
            return True

    def revoke(self, lease: int) -> None:
        with self._changed:
            if self._leases.pop(lease, None) is not None:
                self._drop_of({lease})

    def wait(self, after: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._revision > after, timeout_s)

    def audit(self) -> list[str]:
        """All discrepancies."""
        with self._changed:
            self._expire()
            faults = []
            for key, (document, lease) in self._documents.items():
                if lease and lease not in self._leases:
                    faults.append(f"{key} has outlived its lease")
                if document.revision > self._revision:
                    faults.append(f"{key} is of a revision to come")
            return faults

    def _is(self, key: str, revision: int) -> bool:
        known = self._documents.get(key)
        return (known[0].revision if known else 0) == revision

    def _expire(self) -> None:
        now = self._clock()
        over = {lease for lease, (_, until) in self._leases.items() if until <= now}
        for lease in over:
            del self._leases[lease]
        self._drop_of(over)

    def _drop_of(self, leases: set[int]) -> None:
        self._drop([key for key, (_, lease) in self._documents.items() if lease in leases])

    def _drop(self, keys: list[str]) -> None:
        if keys:
            self._revision += 1
            for key in keys:
                del self._documents[key]
            self._changed.notify_all()
