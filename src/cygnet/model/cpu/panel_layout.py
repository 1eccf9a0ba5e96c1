"""Sizes of panels (`vector`), for those who call the kernels (without numba) and for the kernels themselves."""

PANEL = 64
"""Outputs of a panel."""
ROWS = 4
"""Rows of activations multiplied at once: 16 sums of 16 lanes fit the registers."""
MANY_ROWS = 6
"""The same where the weights are in fp32 already, and need no registers to be widened in."""
ROW_BLOCK = 192
"""Rows that go through a panel together, where they are many: they stay in the second-level cache."""
STRETCH = 1024
"""Inputs multiplied before the next rows have their turn: so much of a panel stays in the second-level cache."""
WIDENED_SCRATCH = 4 * PANEL * (MANY_ROWS + STRETCH)
"""Bytes that a thread needs to multiply widened weights."""
_PIECES = 4
"""Pieces of work per thread, at least where there are so many panels."""
_LONGEST = 16
"""Panels of a piece."""


def panels_per_piece(panels: int, threads: int) -> int:
    """How many panels a thread takes at a time: with few, all threads have work; in a run, the next one is fetched."""
    return max(1, min(panels // (_PIECES * threads), _LONGEST))
