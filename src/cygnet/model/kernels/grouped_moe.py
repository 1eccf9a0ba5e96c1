"""Triton kernels of a mixture of experts: routing, sorting by expert, and products over experts of unlike load.

A *pair* is a token with one of its experts, numbered token * top_k + k. Pairs are sorted by expert, and each expert's
rows are cut into tiles of TILE_ROWS; a tile never spans two experts:

    experts      0 0 0 0 0 | 2 2 | 3 3 3 ...        sorted pairs (expert 1 got none)
    tiles        [0 0 0 0] [0      ] [2 2    ] [3 3 3 ...        TILE_ROWS = 4

How many tiles are used is known on the GPU only. The grid has room for the most there can be; unused ones end at once,
so nothing waits for the GPU, and a step can be captured in a CUDA graph.

Not run on a GPU: run in Triton's interpreter only, and compiled for GPUs.
"""

import triton
import triton.language as tl

from cygnet.model.kernels.elementwise import activate
from cygnet.model.kernels.paged_attention import dot

# fmt: off
# Arguments are grouped by meaning: tensors; scalars and strides; shapes and tiles.


@triton.jit
def route_kernel(
    experts, weights, logits, selection_bias,
    routed_scaling,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, TINY: tl.constexpr,
):
    """One program per token: its TOP_K experts, highest score plus bias first, and their weights (without the bias).

    `logits` [T, NUM_EXPERTS] fp32; `experts` [T, TOP_K] int32; `weights` [T, TOP_K] fp32. Of equal experts the first
    is taken.
    """
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, EXPERTS_PAD)
    inside = index < NUM_EXPERTS
    row = tl.load(logits + token * NUM_EXPERTS + index, mask=inside, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(row)
    else:
        scores = tl.exp(row - tl.max(row, 0))
        scores = scores / tl.sum(scores, 0)
    ranked = scores
    if HAS_BIAS:
        ranked = scores + tl.load(selection_bias + index, mask=inside, other=0.0)
    ranked = tl.where(inside, ranked, float("-inf"))
    places = tl.arange(0, TOP_K_PAD)
    chosen = tl.zeros([TOP_K_PAD], tl.int32)
    chosen_scores = tl.zeros([TOP_K_PAD], tl.float32)
    for k in range(TOP_K):
        best = tl.argmax(ranked, 0, tie_break_left=True).to(tl.int32)
        score = tl.sum(tl.where(index == best, scores, 0.0), 0)
        chosen = tl.where(places == k, best, chosen)
        chosen_scores = tl.where(places == k, score, chosen_scores)
        ranked = tl.where(index == best, float("-inf"), ranked)
    if NORMALISE:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, 0) + TINY)
    target = token * TOP_K + places
    tl.store(experts + target, chosen, mask=places < TOP_K)
    tl.store(weights + target, chosen_scores * routed_scaling, mask=places < TOP_K)


@triton.jit
def count_kernel(counts, experts, num_pairs, TILE: tl.constexpr):
    """One program per expert: how many pairs it got, `counts` [NUM_EXPERTS] int32."""
    expert = tl.program_id(0)
    total = tl.zeros([TILE], tl.int32)
    for start in range(0, num_pairs, TILE):
        pair = start + tl.arange(0, TILE)
        got = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        total += (got == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def sort_kernel(
    order, tile_experts, tile_rows, row_ends, experts, counts,
    num_pairs,
    NUM_EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr, TILE_ROWS: tl.constexpr,
):
    """One program per expert: its pairs, in order, to their place in `order` [num_pairs]; its tiles to the tile lists.

    Per tile: its expert (-1, as filled in before, if unused) and its first row; per expert, the end of its rows.
    """
    expert = tl.program_id(0)
    index = tl.arange(0, EXPERTS_PAD)
    before = tl.load(counts + index, mask=index < expert, other=0)
    row = tl.sum(before, 0)
    tile = tl.sum((before + TILE_ROWS - 1) // TILE_ROWS, 0)
    count = tl.load(counts + expert)
    tl.store(row_ends + expert, row + count)
    for start in range(0, count, TILE_ROWS):
        tl.store(tile_experts + tile + start // TILE_ROWS, expert)
        tl.store(tile_rows + tile + start // TILE_ROWS, row + start)
    for start in range(0, num_pairs, TILE):
        pair = start + tl.arange(0, TILE)
        mine = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + row + rank - 1, pair, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def grouped_gate_up_kernel(
    hidden, x, gate_up, bias, order, tile_experts, tile_rows, row_ends,
    x_stride, limit, up_offset,
    IN: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WIDEN: tl.constexpr,
):
    """Program (t, c): activation(gate) * (up + up_offset) for the rows of tile t and a tile of columns.

    gate | up = x W^T + b. `x` [T, IN] is read through `order`; `gate_up` [experts, 2 * SIZE, IN]; `bias` [experts,
    2 * SIZE]; rows of `hidden` [num_pairs, SIZE] are in sorted order. With HAS_LIMIT, gate is cut at `limit` and up at
    both sides.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        row = tl.load(tile_rows + tile) + tl.arange(0, ROWS)
        inside = row < tl.load(row_ends + expert)
        token = (tl.load(order + row, mask=inside, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        weight = gate_up + expert.to(tl.int64) * (2 * SIZE * IN) + column[None, :] * IN
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, IN, INNER):
            inner = start + tl.arange(0, INNER)
            a = tl.load(
                x + (token * x_stride)[:, None] + inner[None, :],
                mask=inside[:, None] & (inner < IN)[None, :],
                other=0.0,
            )
            mask = (inner < IN)[:, None] & (column < SIZE)[None, :]
            gate = dot(a, tl.load(weight + inner[:, None], mask=mask, other=0.0), gate, WIDEN)
            up = dot(a, tl.load(weight + SIZE * IN + inner[:, None], mask=mask, other=0.0), up, WIDEN)
        if HAS_BIAS:
            place = bias + expert.to(tl.int64) * (2 * SIZE) + column
            gate += tl.load(place, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
            up += tl.load(place + SIZE, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        # Rounded as between operators, so that fused and plain layers differ less.
        gate = gate.to(hidden.dtype.element_ty).to(tl.float32)
        up = up.to(hidden.dtype.element_ty).to(tl.float32)
        if HAS_LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.maximum(tl.minimum(up, limit), -limit)
        acted = activate(gate, ACTIVATION).to(hidden.dtype.element_ty).to(tl.float32)
        tl.store(
            hidden + row.to(tl.int64)[:, None] * SIZE + column[None, :],
            (acted * (up + up_offset)).to(hidden.dtype.element_ty),
            mask=inside[:, None] & (column < SIZE)[None, :],
        )


@triton.jit
def grouped_down_kernel(
    out, hidden, down, bias, order, tile_experts, tile_rows, row_ends,
    SIZE: tl.constexpr, OUT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, WIDEN: tl.constexpr,
):
    """Program (t, c): hidden W^T + b for the rows of tile t and a tile of columns, put back into the pairs' order.

    `hidden` [num_pairs, SIZE] in sorted order; `down` [experts, OUT, SIZE]; `bias` [experts, OUT]; `out` [num_pairs,
    OUT] by pair.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        row = tl.load(tile_rows + tile) + tl.arange(0, ROWS)
        inside = row < tl.load(row_ends + expert)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        weight = down + expert.to(tl.int64) * (OUT * SIZE) + column[None, :] * SIZE
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, SIZE, INNER):
            inner = start + tl.arange(0, INNER)
            a = tl.load(
                hidden + row.to(tl.int64)[:, None] * SIZE + inner[None, :],
                mask=inside[:, None] & (inner < SIZE)[None, :],
                other=0.0,
            )
            mask = (inner < SIZE)[:, None] & (column < OUT)[None, :]
            acc = dot(a, tl.load(weight + inner[:, None], mask=mask, other=0.0), acc, WIDEN)
        if HAS_BIAS:
            row_bias = tl.load(bias + expert.to(tl.int64) * OUT + column, mask=column < OUT, other=0.0)
            acc += row_bias.to(tl.float32)[None, :]
        pair = tl.load(order + row, mask=inside, other=0).to(tl.int64)
        tl.store(
            out + pair[:, None] * OUT + column[None, :],
            acc.to(out.dtype.element_ty),
            mask=inside[:, None] & (column < OUT)[None, :],
        )


@triton.jit
def combine_kernel(out, pairs, weights, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Program (t, c): the outputs of token t's experts, `pairs` [T * TOP_K, SIZE], summed by weight; columns of c."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    total = tl.zeros([TILE], tl.float32)
    for k in range(TOP_K):
        weight = tl.load(weights + token * TOP_K + k)
        row = tl.load(pairs + (token * TOP_K + k) * SIZE + column, mask=inside, other=0.0)
        total += weight * row.to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=inside)
