"""Chained block keys: the name of a block is a hash of all tokens up to its end.

    key[i] = blake2b(key[i - 1] + tokens[i * block_size : (i + 1) * block_size])        key[-1] = root key

Two sequences have equal keys at `i` exactly when they agree on everything up to the end of block `i` (and on model and
tenant, which the root key carries). A collision would serve one tenant's KV to another, hence a cryptographic hash.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from cygnet.base.ids import BlockKey

KEY_BYTES = 16


def root_key(fingerprint: str, salt: str = "") -> BlockKey:
    """Key of the empty prefix, for a model (name, geometry, dtype: whatever KV depends on) and a tenant's salt."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"cygnet.root")
    for part in (fingerprint, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths first: ("a", "bc") must differ from ("ab", "c")
    return BlockKey(digest.digest())


def extend_keys(keys: list[BlockKey], root: BlockKey, token_ids: Sequence[int], block_size: int, upto: int) -> None:
    """Append to `keys` the keys of all whole blocks of `token_ids[:upto]` that it lacks. O(new tokens)."""
    first, last = len(keys), upto // block_size
    if first >= last:
        return
    data = array("i", token_ids[first * block_size : last * block_size]).tobytes()
    step = block_size * 4
    parent = keys[-1] if keys else root
    for offset in range(0, len(data), step):
        parent = BlockKey(blake2b(parent + data[offset : offset + step], digest_size=KEY_BYTES).digest())
        keys.append(parent)


def common_blocks(a: Sequence[BlockKey], b: Sequence[BlockKey]) -> int:
    """Number of leading blocks that two key chains share. O(log n): chained keys agree on a prefix only."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
