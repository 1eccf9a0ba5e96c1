"""Cuts a step's chunks into pieces of work for the compiled kernel."""

from collections.abc import Sequence

import numpy as np

from cygnet.model.batch import ForwardBatch, GroupBatch
from cygnet.model.cpu.chunk_layout import FIELDS, PANELS, ROWS
from cygnet.model.description import AttentionSpec

PIECE_COST = 0.12
"""What a piece costs beside its panels, as a part of a panel's cost."""


def panels_per_piece(num_panels: Sequence[int], threads: int) -> int:
    """How many panels the pieces should have, so that the slowest thread is done soonest; chunks have `num_panels`."""

    def longest(size: int) -> float:
        whole, rest = sum(n // size for n in num_panels), [n % size for n in num_panels if n % size]
        cost = whole * (size + PIECE_COST) + sum(rest) + PIECE_COST * len(rest)
        return max(-(-whole // threads) * (size + PIECE_COST), cost / threads)

    return min(range(1, PANELS + 1), key=longest)


def plan_pieces(
    spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch, requests: Sequence[int], threads: int
) -> tuple[np.ndarray, int]:
    """The pieces of the requests' chunks, longest first, int64 [pieces, FIELDS] as the kernel documents them.

    Also their cost: rows times keys.
    """
    counts = [batch.query_start[r + 1] - batch.query_start[r] for r in requests]
    num_panels = [-(-n * spec.group_size // ROWS) for n in counts] * spec.num_kv_heads
    per_piece = ROWS * panels_per_piece(num_panels, threads)
    table = group.block_table
    address, row_bytes = table.data_ptr(), table.stride(0) * table.itemsize
    parts, costs = [np.empty((0, FIELDS), dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for request, n in zip(requests, counts, strict=True):
        first_query = batch.seq_lens[request] - n
        rows = n * spec.group_size
        first = np.arange(0, rows, per_piece)
        pieces = np.empty((spec.num_kv_heads, len(first), FIELDS), dtype=np.int64)
        pieces[..., 0] = batch.query_start[request]
        pieces[..., 1] = first
        pieces[..., 2] = np.minimum(per_piece, rows - first)
        pieces[..., 3] = np.arange(spec.num_kv_heads)[:, None]
        pieces[..., 4] = first_query
        pieces[..., 5] = group.key_floor[request]
        pieces[..., 6] = address + request * row_bytes
        pieces[..., 7] = group.first_block[request]
        end = first_query + (pieces[..., 1] + pieces[..., 2] - 1) // spec.group_size + 1
        low = pieces[..., 5]
        if spec.window is not None:
            low = np.maximum(low, first_query + pieces[..., 1] // spec.group_size - spec.window)
        parts.append(pieces.reshape(-1, FIELDS))
        costs.append((pieces[..., 2] * (end - low)).reshape(-1))
    cost = np.concatenate(costs)
    order = np.argsort(-cost, kind="stable")
    return np.concatenate(parts)[order], int(cost.sum())
