"""Chains of block keys from lists of numbers."""

from cygnet.router.prompt import chain_keys


def chain_of(words: list[int]) -> bytes:
    """A chain whose key at depth d depends on the first d words."""
    text = b"".join(word.to_bytes(4, "little") for word in words)
    return chain_keys(memoryview(text), 7, 4)
