"""Which cached block of a worker ends where a prefix of text does: learned from prompts that workers have computed.

The router knows a prompt's text and its block keys (`prompt.py`), a worker its tokens and *their* block keys. Once a
worker tells that a prompt is computed, and under which key its last block is cached, both chains of the same prompt are
known, and text is laid over tokens in proportion:

    text     ├────────┼────────┼────────┼────────┼────────┼──┤      depth 1, 2, 3 ... (blocks of text)
    tokens   ├───┼───┼───┼───┼───┼───┼───┼───┼───┼───┼───┼───┤      key of the last whole block before each

So where a prefix is cached is asked in the worker's own keys, which carry model, tenant's salt and chat template,
without a tokenizer in the router. Where bytes per token differ along a prompt, a depth is off by as much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cygnet.kv.residency import Block
from cygnet.router.ladder import chain_length, key_at, rungs, stored_depths

FIRST_DEPTHS = 4
"""A chain of which none of so many first prefixes was learned is taken for unknown."""


@dataclass(frozen=True, slots=True)
class Known:
    """Prefixes of a prompt whose cached blocks are known: depths ascending, and the key of a cached block for each."""

    depths: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()


NOTHING_KNOWN = Known()


class LearnedPrefixes:
    """Text key -> key of a cached block, for the prefixes that the index stores too (`ladder.py`).

    Bounded like the index: two generations of half of `max_entries`; what is learned again becomes young.

    Invariant: at most `max_entries` entries.
    """

    def __init__(self, max_entries: int) -> None:
        self._half = max(1, max_entries // 2)
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _get(self, key: bytes) -> bytes | None:
        return self._young.get(key) or self._old.get(key)

    def learn(
        self, chain: bytes, text_blocks: float, tip: Block, num_tokens: int, block_size: int
    ) -> dict[bytes, bytes]:
        """A prompt of `num_tokens` tokens, whose text takes `text_blocks` blocks, is cached up to `tip`. Returns what
        is new, for `note` of others. O(tokens) in pointers followed, and less where its beginning was learned before.
        """
        new: dict[bytes, bytes] = {}
        begun = self._is_begun(chain)
        block = tip
        for depth in reversed(stored_depths(chain_length(chain))):
            target = min(int(num_tokens * depth / text_blocks) // block_size - 1, tip.index)
            if target < 0:
                break
            while block.index > target:
                assert block.parent is not None
                block = block.parent
            key = key_at(chain, depth)
            if self._young.get(key) != block.key:
                new[key] = block.key
            elif begun:  # and so is what is before it; of others' lessons only the last may have been heard
                break
        self.note(new)
        return new

    def note(self, entries: Mapping[bytes, bytes]) -> None:
        """Text keys and the keys of their cached blocks."""
        for key, block_key in entries.items():
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            self._young[key] = block_key
            self._old.pop(key, None)

    def _is_begun(self, chain: bytes) -> bool:
        """Whether one of the first prefixes is known."""
        first = range(1, min(chain_length(chain), FIRST_DEPTHS) + 1)
        return any(self._get(key_at(chain, depth)) is not None for depth in first)

    def find(self, chain: bytes) -> Known:
        """What is known of a prompt's prefixes. O(blocks of text beyond the last one known)."""
        num_blocks = chain_length(chain)
        if not self._is_begun(chain):
            return NOTHING_KNOWN
        last = next(depth for depth in range(num_blocks, 0, -1) if self._get(key_at(chain, depth)) is not None)
        depths, keys = [], []
        for depth in dict.fromkeys((*rungs(last), last)):
            key = self._get(key_at(chain, depth))
            if key is not None:
                depths.append(depth)
                keys.append(key)
        return Known(tuple(depths), tuple(keys))
