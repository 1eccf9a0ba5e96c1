"""Block keys for tests of what comes after them."""

from array import array
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest


def chain_of(words: Iterable[int]) -> bytes:
    """The chain of a prompt of one block per word."""
    keys, key = array("Q"), 7
    for word in words:
        key = xxh3_64_intdigest(word.to_bytes(4, "little"), key)
        keys.append(key)
    return keys.tobytes()
