"""Cuts a step's chunks into pieces of work for the compiled kernel."""

from collections.abc import Sequence

import numpy as np

from cygnet.model.batch import ForwardBatch, GroupBatch
from cygnet.model.cpu.chunk_layout import FIELDS, PANELS, ROWS
from cygnet.model.description import AttentionSpec

PIECES_PER_THREAD = 8
"""Pieces that a step is cut into, per thread and about, so that no thread is left with much more than the others."""


def plan_pieces(
    spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch, requests: Sequence[int], threads: int
) -> tuple[np.ndarray, int]:
    """The pieces of the requests' chunks, longest first, int64 [pieces, FIELDS] as the kernel documents them.

    Also their cost: rows times keys.
    """
    counts = [batch.query_start[r + 1] - batch.query_start[r] for r in requests]
    num_panels = sum(-(-n * spec.group_size // ROWS) for n in counts) * spec.num_kv_heads
    per_piece = ROWS * min(PANELS, max(1, num_panels // (PIECES_PER_THREAD * threads)))
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
