"""Block keys of prompts that are known by the names of their pieces only.

The engine names a block by a hash of its tokens and of all before them. A simulated prompt has no tokens; its blocks
are named by the pieces, and places in them, that they hold. Two prompts then have equal keys exactly where prompts made
of the pieces' tokens would: pieces of one key have the same tokens, of different keys different ones.

    pieces    system, 100 tokens              question-7, 60 tokens
    blocks    system 0-63 | system 64-99, question-7 0-27 | (question-7 28-59: no whole block, no key)
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from cygnet.base.ids import BlockKey
from cygnet.kv.hashing import KEY_BYTES
from cygnet.sim.sessions import BYTES_PER_TOKEN, Piece, Turn

TEXT_TOKENS = 64
"""A text is taken as pieces of this many tokens, named by their bytes."""


class KeyChain:
    """Keys of a growing sequence of pieces.

    Invariant: `keys` names all whole blocks of the tokens so far; `_rest` is what lies after the last one, less than a
    block.
    """

    def __init__(self, root: BlockKey, block_size: int, keys: Sequence[BlockKey] = ()) -> None:
        """The sequence whose blocks have `keys`, and no tokens after them."""
        self.keys = list(keys)
        self.num_tokens = len(self.keys) * block_size
        self._root = root
        self._block_size = block_size
        self._rest: list[tuple[str, int, int]] = []
        self._missing = block_size

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Append pieces. O(blocks), less for pieces seen before in the same place."""
        size, keys = self._block_size, self.keys
        for name, length in pieces:
            self.num_tokens += length
            offset = 0
            if self._rest:
                offset = min(length, self._missing)
                self._fill(name, 0, offset)
            whole = (length - offset) // size
            if whole == 1 and offset == 0:  # traces of blocks: no two places have the same one, so nothing to remember
                keys.append(_key(keys[-1] if keys else self._root, _content(name, 0, size)))
                offset = size
            elif whole:
                keys += _whole_blocks(keys[-1] if keys else self._root, name, offset, whole, size)
                offset += whole * size
            if offset < length:
                self._fill(name, offset, length - offset)

    def _fill(self, name: str, offset: int, count: int) -> None:
        self._rest.append((name, offset, count))
        self._missing -= count
        if self._missing == 0:
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(_key(parent, repr(self._rest)))
            self._rest, self._missing = [], self._block_size


def _key(parent: BlockKey, content: str) -> BlockKey:
    return BlockKey(blake2b(parent + content.encode(), digest_size=KEY_BYTES).digest())


def _content(name: str, offset: int, size: int) -> str:
    """What a block holds that lies within one piece."""
    return f"{name!r} {offset} {size}"


@lru_cache(maxsize=1 << 16)
def _whole_blocks(parent: BlockKey, name: str, offset: int, count: int, size: int) -> tuple[BlockKey, ...]:
    keys = []
    for index in range(count):
        parent = _key(parent, _content(name, offset + index * size, size))
        keys.append(parent)
    return tuple(keys)


def pieces_of(turn: Turn) -> tuple[Piece, ...]:
    """A turn's pieces; a text's are its stretches of `TEXT_TOKENS` tokens, named by what they say."""
    if turn.text is None:
        return turn.pieces
    data, step = turn.text.encode(), TEXT_TOKENS * BYTES_PER_TOKEN
    pieces = []
    for start in range(0, len(data), step):
        part = data[start : start + step]
        length = max(1, len(part) // BYTES_PER_TOKEN)
        pieces.append(Piece(blake2b(part, digest_size=KEY_BYTES).hexdigest(), length))
    return tuple(pieces)
