"""API keys and what each may use."""

from dataclasses import dataclass
from hashlib import blake2b

NS_PER_MINUTE = 60_000_000_000


def key_digest(key: str) -> bytes:
    """Name of an API key inside the router. Keys themselves are not kept, and digests are safe to look up and to
    log.
    """
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, person=b"cygnet.key").digest()


@dataclass(slots=True)
class _Usage:
    in_flight: int = 0
    credit_ns: int = 0
    at: int = 0


class KeyLimits:
    """Requests in flight and per minute of each key; 0 means no limit. Keys are known from the start, so it is bounded.

    Invariants (`audit`): a key never has more in flight than allowed, nor fewer than none; credit is within one minute.
    """

    def __init__(self, digests: frozenset[bytes], max_in_flight: int, per_minute: int) -> None:
        self._max_in_flight = max_in_flight
        self._per_minute = per_minute
        self._usage = {digest: _Usage(credit_ns=NS_PER_MINUTE) for digest in digests}

    def __contains__(self, digest: object) -> bool:
        return digest in self._usage

    def begin(self, digest: bytes, now: int) -> int:
        """Count a request; returns 0, or the seconds after which to try again, and then nothing is counted."""
        usage = self._usage[digest]
        if self._max_in_flight and usage.in_flight >= self._max_in_flight:
            return 1
        if self._per_minute:
            price = NS_PER_MINUTE // self._per_minute
            usage.credit_ns = min(NS_PER_MINUTE, usage.credit_ns + max(0, now - usage.at))
            usage.at = now
            if usage.credit_ns < price:
                return max(1, -(-(price - usage.credit_ns) // 1_000_000_000))
            usage.credit_ns -= price
        usage.in_flight += 1
        return 0

    def end(self, digest: bytes) -> None:
        """A counted request is over."""
        self._usage[digest].in_flight -= 1

    def audit(self) -> list[str]:
        """Discrepancies."""
        found = []
        for digest, usage in self._usage.items():
            if usage.in_flight < 0 or (self._max_in_flight and usage.in_flight > self._max_in_flight):
                found.append(f"key {digest.hex()} has {usage.in_flight} in flight")
            if not 0 <= usage.credit_ns <= NS_PER_MINUTE:
                found.append(f"key {digest.hex()} has a credit of {usage.credit_ns} ns")
        return found
