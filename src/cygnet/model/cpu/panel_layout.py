"""Sizes of panels (`vector`), for those who call the kernels (without numba) and for the kernels themselves."""

PANEL = 64
"""Outputs of a panel."""
ROWS = 4
"""Rows of activations multiplied at once: 16 sums of 16 lanes fit the registers."""
_PIECES = 4
"""Pieces of work per thread, at least where there are so many panels."""
_LONGEST = 16
"""Panels of a piece."""


def panels_per_piece(panels: int, threads: int) -> int:
    """How many panels a thread takes at a time: with few, all threads have work; in a run, the next one is fetched."""
    return max(1, min(panels // (_PIECES * threads), _LONGEST))
