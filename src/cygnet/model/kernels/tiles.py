"""Tile sizes of the kernels. Every number here is a guess: reasoned from the memory it takes, never timed on a GPU.

What is checked without one: with these tiles each kernel compiles for sm_80, sm_90 and sm_100, and its shared memory
fits what the smallest of these grants a block (tests/kernels/test_compiles.py).
"""

from dataclasses import dataclass

MIN_DOT = 16
"""Least extent of each side of a matrix product."""


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Extent that a head dimension gets in a tile; what is beyond `dim` is masked."""
    return max(MIN_DOT, power_of_two(dim))


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of one attention kernel."""

    rows: int
    """Query rows; the heads of a GQA group are rows of one tile."""
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(key_dim: int, value_dim: int, group_size: int, dtype_bytes: int) -> AttentionTiles:
    """For chunks. Wide heads and fp32 get smaller tiles: Q, and `num_stages` of K and V, live in shared memory."""
    width = (padded_dim(key_dim) + padded_dim(value_dim)) * dtype_bytes
    rows = max(MIN_DOT, power_of_two(group_size))
    if width <= 512:
        return AttentionTiles(max(rows, 128), 64, 8, 2)
    if width <= 1024:
        return AttentionTiles(max(rows, 64), 32, 4, 2)
    return AttentionTiles(max(rows, 32), 16, 4, 2)


def decode_tiles(key_dim: int, value_dim: int, group_size: int, dtype_bytes: int) -> AttentionTiles:
    """For single tokens: few rows, so the keys in flight decide; as many as fit."""
    width = (padded_dim(key_dim) + padded_dim(value_dim)) * dtype_bytes
    keys = 64 if width <= 512 else 32 if width <= 1024 else 16
    return AttentionTiles(max(MIN_DOT, power_of_two(group_size)), keys, 4, 2)


MAX_SPLITS = 32
"""Most parts that the keys of one decode are cut into."""
MIN_SPLIT_KEYS = 256
"""A part with fewer keys is not worth its share of the reduction."""
PROGRAMS_PER_PROCESSOR = 2
"""Decode programs to have per multiprocessor before a split gains nothing more."""


def num_splits(num_decodes: int, num_kv_heads: int, max_keys: int, num_processors: int) -> int:
    """Parts to cut each decode's keys into, so that few or long requests occupy the whole GPU."""
    programs = max(1, num_decodes * num_kv_heads)
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // programs)
    return max(1, min(wanted, MAX_SPLITS, max_keys // MIN_SPLIT_KEYS))


@dataclass(frozen=True)
class GemmTiles:
    """Tiles of a grouped matrix product."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def moe_tiles(num_pairs: int, num_experts: int, dtype_bytes: int) -> GemmTiles:
    """By how many token-expert pairs an expert gets on average: rows beyond an expert's own are padding."""
    average = num_pairs / num_experts
    inner = 64 if dtype_bytes == 2 else 32
    if average <= 16:
        return GemmTiles(16, 64, inner, 4, 3)
    if average <= 64:
        return GemmTiles(32, 64, inner, 4, 3)
    return GemmTiles(64, 64, inner, 4, 3)
