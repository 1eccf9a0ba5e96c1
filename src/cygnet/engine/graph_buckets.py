"""Which decode steps to capture as CUDA graphs, and which captured size serves a step. Pure arithmetic.

A captured graph replays one fixed batch size. A step of fewer requests is padded to the next captured size, its bucket:

    captured   1   2   4   8        16        24        32 ...
    step of                5 -> 8      11 -> 16

Memory. Graphs share one pool for what a step allocates on the way, since only one replays at a time. The largest is
captured first, and the smaller ones fit into the memory it leaves behind; so the pool costs what the largest needs, and
each graph adds only its own launch records. The static inputs are shared too, and made for the largest.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FINE_SIZES = (1, 2, 4)
"""Small batches, where a padded row costs a large share."""
STEP = 8
"""Distance of further sizes up to `COARSE_FROM`; from there on sizes grow by an eighth, in multiples of `STEP`."""
COARSE_FROM = 128


@dataclass(frozen=True)
class GraphMemory:
    """What graphs of a model cost on a device, in bytes."""

    pool_bytes_per_row: int
    """Activations of a step, per request in the batch, kept in the shared pool."""
    graph_bytes: int
    """Records of one graph, whatever its batch size."""
    input_bytes_per_row: int = 0
    """Static inputs, block tables above all, per request in the largest batch."""

    @property
    def bytes_per_row(self) -> int:
        """What the largest batch costs, per request."""
        return self.pool_bytes_per_row + self.input_bytes_per_row

    def total(self, sizes: Sequence[int]) -> int:
        """Bytes of graphs for `sizes`: inputs and one pool that fit the largest, and every graph's records."""
        return self.bytes_per_row * max(sizes, default=0) + self.graph_bytes * len(sizes)


@dataclass(frozen=True)
class Buckets:
    """Batch sizes with a graph, ascending, each once."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.sizes) != sorted(set(self.sizes)) or (self.sizes and self.sizes[0] < 1):
            raise ValueError(f"bucket sizes must be positive and ascending, not {self.sizes}")

    @property
    def largest(self) -> int:
        """0 if nothing is captured."""
        return self.sizes[-1] if self.sizes else 0

    def bucket_for(self, num_requests: int) -> int | None:
        """Smallest size that holds the batch; `None` if there is none, or the batch is empty: run without a graph."""
        if num_requests < 1 or num_requests > self.largest:
            return None
        return self.sizes[bisect_left(self.sizes, num_requests)]

    def padding(self, num_requests: int) -> int:
        """Rows that a graphed step of that many requests computes for nothing; 0 without a graph."""
        bucket = self.bucket_for(num_requests)
        return 0 if bucket is None else bucket - num_requests

    def capture_order(self) -> tuple[int, ...]:
        """Largest first, so that the shared pool never has to grow."""
        return tuple(reversed(self.sizes))


def candidate_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes worth a graph for up to `max_num_seqs` requests, ascending; the last is `max_num_seqs` itself.

    Above 8, padding stays below `STEP` rows or an eighth of the batch, whichever is more.
    """
    sizes = {size for size in FINE_SIZES if size < max_num_seqs}
    size = STEP
    while size < max_num_seqs:
        sizes.add(size)
        size += STEP if size < COARSE_FROM else size // 8 // STEP * STEP
    if max_num_seqs > 0:
        sizes.add(max_num_seqs)
    return tuple(sorted(sizes))


def choose_buckets(max_num_seqs: int, memory: GraphMemory, budget_bytes: int) -> Buckets:
    """The candidates that fit in `budget_bytes`.

    Decodes are bound by launches while batches are small, so what does not fit is dropped from the large end; if even
    the records of all remaining graphs are too many, every other size goes, which only costs padding.
    """
    sizes = list(candidate_sizes(max_num_seqs))
    while sizes and memory.total(sizes[:1]) <= budget_bytes < memory.total(sizes):
        thinned = [*sizes[:-1][::2], sizes[-1]]
        # Dropping the largest frees its share of the pool; thinning frees records. Take what frees more.
        if len(thinned) < len(sizes) and memory.graph_bytes * (len(sizes) - len(thinned)) > (
            memory.bytes_per_row * (sizes[-1] - sizes[-2]) + memory.graph_bytes
        ):
            sizes = thinned
        else:
            sizes.pop()
    return Buckets(tuple(sizes) if memory.total(sizes) <= budget_bytes else ())
