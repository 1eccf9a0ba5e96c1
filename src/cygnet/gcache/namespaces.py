"""What each namespace may take of a server's memory, and for how long. Pure.

A namespace is the first part of a full key (`record.full_key`). Limits are given for a name, or for all names with
the same beginning: `tenant-*`. Of several that fit the longest counts, and a whole name before any beginning.
"""

from collections.abc import Mapping

from cygnet.base.errors import ConfigError
from cygnet.base.units import parse_bytes
from cygnet.gcache.arena import Entry
from cygnet.gcache.limits import MAX_NAMESPACE_BYTES, NamespaceLimits
from cygnet.gcache.record import split_key

MAX_SPARED = 64
MAX_SHOWN = 100
"""Namespaces in the statistics: those that take most."""


NO_LIMITS = NamespaceLimits()


def parse_limits(text: str) -> tuple[bytes, NamespaceLimits]:
    """What `NAME:quota=SIZE,value=SIZE,ttl=SECONDS` means. Raises `ConfigError`."""
    name, _, rest = text.rpartition(":")
    found: dict[str, int] = {}
    try:
        for part in rest.split(","):
            option, _, value = part.partition("=")
            field = {"quota": "max_bytes", "value": "max_value_bytes", "ttl": "ttl_ms"}[option.strip()]
            found[field] = int(float(value) * 1000) if field == "ttl_ms" else parse_bytes(value)
            if found[field] < 1:
                raise ValueError
    except (KeyError, ValueError, ConfigError):
        raise ConfigError(
            f"limits {text!r} are not NAME:quota=SIZE,value=SIZE,ttl=SECONDS, each of the three more than 0 or left out"
        ) from None
    if len(name.encode()) > MAX_NAMESPACE_BYTES or "*" in name[:-1]:
        raise ConfigError(f"{name[:40]!r} is no namespace: at most 255 bytes, and * only at its end")
    return name.encode(), NamespaceLimits(**found)


class Namespaces:
    """Objects in memory by namespace, for namespaces that have limits.

    Invariants (`audit`): each object in memory of such a namespace is counted once, with its bytes.
    """

    def __init__(self, limits: Mapping[bytes, NamespaceLimits]) -> None:
        self._exact = {name: limit for name, limit in limits.items() if not name.endswith(b"*")}
        self._prefixes = sorted(
            ((name[:-1], limit) for name, limit in limits.items() if name.endswith(b"*")), key=lambda one: -len(one[0])
        )
        self.any = bool(limits)
        """Whether there are limits at all."""
        self._entries: dict[bytes, dict[Entry, None]] = {}
        """By age, the oldest first."""
        self._bytes: dict[bytes, int] = {}

    def limits_of(self, key: bytes) -> NamespaceLimits:
        """Limits of a key's namespace. O(limits)."""
        return self._of(split_key(key)[0]) if self.any else NO_LIMITS

    def _of(self, namespace: bytes) -> NamespaceLimits:
        exact = self._exact.get(namespace)
        if exact is not None:
            return exact
        return next((limit for prefix, limit in self._prefixes if namespace.startswith(prefix)), NO_LIMITS)

    def add(self, entry: Entry) -> None:
        """It has come to memory."""
        if not self.any:
            return
        namespace = split_key(entry.key)[0]
        if self._of(namespace) is not NO_LIMITS:
            self._entries.setdefault(namespace, {})[entry] = None
            self._bytes[namespace] = self._bytes.get(namespace, 0) + entry.num_bytes

    def remove(self, entry: Entry) -> None:
        """It has left memory."""
        if not self.any:
            return
        namespace = split_key(entry.key)[0]
        entries = self._entries.get(namespace)
        if entries is None or entry not in entries:
            return
        del entries[entry]
        self._bytes[namespace] -= entry.num_bytes
        if not entries:
            del self._entries[namespace], self._bytes[namespace]

    def excess(self, key: bytes, num_bytes: int) -> list[Entry] | None:
        """Objects to give up, so that `key` may have so many bytes more; `None`: that is not possible.

        The oldest that nobody uses; some that have been read are spared, and count as new.
        """
        if not self.any:
            return []
        namespace = split_key(key)[0]
        quota = self._of(namespace).max_bytes
        over = self._bytes.get(namespace, 0) + num_bytes - quota
        if not quota or over <= 0:
            return []
        entries = self._entries.get(namespace, {})
        chosen: list[Entry] = []
        spared: list[Entry] = []
        for entry in entries:
            if entry.pins:
                continue
            if entry.uses and len(spared) < MAX_SPARED:
                spared.append(entry)
                continue
            chosen.append(entry)
            over -= entry.num_bytes
            if over <= 0:
                break
        for at, entry in enumerate(spared):
            if over <= 0:
                spared = spared[at:]
                break
            chosen.append(entry)
            over -= entry.num_bytes
        for entry in spared if over <= 0 else ():
            if entry not in chosen:
                del entries[entry]
                entries[entry] = None
        return chosen if over <= 0 else None

    def stats(self) -> dict[str, dict[str, int]]:
        """Bytes and objects by namespace, for those that take most."""
        most = sorted(self._bytes, key=lambda namespace: -self._bytes[namespace])[:MAX_SHOWN]
        names = {namespace: namespace.decode("utf-8", "backslashreplace") for namespace in most}
        return {
            "namespace_bytes": {names[namespace]: self._bytes[namespace] for namespace in most},
            "namespace_objects": {names[namespace]: len(self._entries[namespace]) for namespace in most},
        }

    def audit(self, entries: list[Entry]) -> list[str]:
        """All discrepancies with `entries`, which are in memory."""
        expected: dict[bytes, set[Entry]] = {}
        for entry in entries if self.any else ():
            namespace = split_key(entry.key)[0]
            if self._of(namespace) is not NO_LIMITS:
                expected.setdefault(namespace, set()).add(entry)
        faults = []
        if {namespace: set(found) for namespace, found in self._entries.items()} != expected:
            faults.append("objects of limited namespaces are not those in memory")
        if self._bytes != {name: sum(entry.num_bytes for entry in found) for name, found in expected.items()}:
            faults.append("bytes of limited namespaces are wrong")
        return faults
