"""Which prefixes of a prompt the index stores: a checkpoint ladder.

A prompt of n blocks has n prefixes, named by their depth 1..n. Storing all would make a 1M-token prompt cost thousands
of entries, so depths thin out:

    depth   1 2 3 ... 32 | 36 40 44 ... 256 | 272 288 ...        and the last 8 depths of the prompt, exactly
            every one    | every 4th        | every 16th

The next turn of a session begins with the whole of the last one, so what is probed most is the end of an earlier
prompt, and that is stored exactly. Elsewhere a match is short by at most 15 blocks.
"""

from bisect import bisect_right

KEY_BYTES = 8
"""A block key in a prompt's chain is this long; a chain is all keys joined."""

MAX_BLOCKS = 1 << 15
"""Longest chain that is looked up; blocks beyond it are not."""

TAIL = 8
"""Last depths of a prompt that are stored whatever the ladder says."""


def _build() -> tuple[int, ...]:
    depths, depth = [], 1
    while depth <= MAX_BLOCKS:
        depths.append(depth)
        depth += step_at(depth)
    return tuple(depths)


def step_at(depth: int) -> int:
    """Distance from ladder depth `depth` to the next one."""
    return 1 if depth < 32 else 4 if depth < 256 else 16


LADDER = _build()


def rungs(num_blocks: int) -> tuple[int, ...]:
    """Ladder depths up to `num_blocks`, ascending."""
    return LADDER[: bisect_right(LADDER, num_blocks)]


def stored_depths(num_blocks: int) -> list[int]:
    """All depths that a prompt of `num_blocks` blocks stores, ascending: its rungs and its tail."""
    ladder = rungs(num_blocks)
    return sorted({*ladder, *range(max(1, num_blocks - TAIL + 1), num_blocks + 1)})


def key_at(chain: bytes, depth: int) -> bytes:
    """Key of the prefix of `depth` blocks."""
    return chain[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]


def chain_length(chain: bytes) -> int:
    """Blocks of `chain` that are looked up."""
    return min(len(chain) // KEY_BYTES, MAX_BLOCKS)
