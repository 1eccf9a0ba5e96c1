"""Sizes and memory of the chunk kernel, for those who call it (without numba) and for the kernel itself."""

ROWS = 32
"""Rows of a panel."""
BLOCK = 16
"""Value dims packed side by side; also the lanes of a vector."""
KEYS = 8
"""Keys whose scores, and value dims whose sums, are worked out together."""
TILE = 128
"""Keys that a panel meets at once."""
PANELS = 4
"""Panels of a piece, at most."""
FIELDS = 8
"""Numbers that describe a piece."""
STATE = 3 * ROWS
"""Floats of a panel's state: largest scores, sums of weights, factors."""


def scratch_floats(key_dim: int, value_dim: int) -> int:
    """Floats of scratch that a thread needs, a whole number of cache lines; for bf16 a little more than that."""
    keys, num_dims = (-(-n // BLOCK) * BLOCK for n in (key_dim, value_dim))
    places = 8 * TILE + (2 + PANELS) * ROWS
    tile = 2 * TILE * ROWS + TILE * num_dims
    return places + PANELS * (STATE + ROWS * (keys + num_dims)) + max(num_dims, keys) + tile
