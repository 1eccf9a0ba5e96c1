"""Rendezvous hashing: everyone who knows the same names agrees on the order of preference for a key."""

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """`names`, most preferred first. A name that leaves moves only the keys that preferred it. O(n log n)."""
    seed = xxh3_64_intdigest(key)
    return sorted(names, key=lambda name: (xxh3_64_intdigest(name.encode(), seed), name), reverse=True)
