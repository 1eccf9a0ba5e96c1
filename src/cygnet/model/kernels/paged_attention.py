"""Triton kernels of attention over paged KV: write, prefill with prefix, split-KV decode and its reduction.

The query heads that share a KV head are folded into the rows of one tile, query after query, so that a tile of keys is
loaded once for all of them:

    row    0    1    2    3    4    5   ...        GROUP = 3
    query  0    0    0    1    1    1   ...
    head   0    1    2    0    1    2   ...        within the group

Scores are kept in units of log 2, sums in fp32. A sink starts the softmax: its logit is the first maximum, with weight
one and no value. Slots that no query of a tile may read are not loaded at all, so what they hold (NaN) can't matter.

Positions are int32, offsets into the cache int64. The metadata of a request is a row of `requests` [R, 4] int32:
first row of the step, sequence length after the step, block index of the table's column 0, first readable position.

Not run on a GPU: run in Triton's interpreter only, and compiled for GPUs.
"""

import triton
import triton.language as tl

# fmt: off
# Arguments are grouped by meaning: tensors; scalars and strides; shapes and tiles.

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
REQUEST_FIELDS: tl.constexpr = tl.constexpr(4)


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a b with exact products. WIDEN is for the interpreter, which can't multiply bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def write_kv_kernel(
    key_cache, value_cache, key, value, slots,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEADS_PAD: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):
    """One program per token: its K and V of all heads go to its slot; -1 writes nothing. The cache is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, HEADS_PAD)[:, None]
        dims = tl.arange(0, KEY_PAD)[None, :]
        inside = (heads < NUM_HEADS) & (dims < KEY_DIM)
        row = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=inside)
        target = key_cache + slot * (NUM_HEADS * KEY_DIM) + heads * KEY_DIM + dims
        tl.store(target, row.to(key_cache.dtype.element_ty), mask=inside)
        dims = tl.arange(0, VALUE_PAD)[None, :]
        inside = (heads < NUM_HEADS) & (dims < VALUE_DIM)
        row = tl.load(value + token * value_token_stride + heads * value_head_stride + dims, mask=inside)
        target = value_cache + slot * (NUM_HEADS * VALUE_DIM) + heads * VALUE_DIM + dims
        tl.store(target, row.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit
def attend_range(
    q, peak, total, acc, row_position, first, end, table, first_block, key_cache, value_cache, kv_head,
    score_scale,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Carry an online softmax over the keys at positions first .. end - 1 of one request and one KV head.

    `q` [rows, KEY_PAD]; state: `peak`, `total` [rows], `acc` [rows, VALUE_PAD]; `row_position` [rows]. All positions of
    the range must be readable by some row. WINDOW is -1 for full layers.
    """
    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    for start in range(first, end, TILE_KEYS):
        position = start + tl.arange(0, TILE_KEYS)
        live = position < end
        block = tl.load(table + (position // BLOCK_SIZE - first_block), mask=live, other=0).to(tl.int64)
        slot_head = (block * BLOCK_SIZE + position % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        k = tl.load(
            key_cache + slot_head[None, :] * KEY_DIM + key_dims[:, None],
            mask=live[None, :] & (key_dims < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = dot(q, k, tl.zeros([q.shape[0], TILE_KEYS], tl.float32), WIDEN) * score_scale
        seen = live[None, :] & (position[None, :] <= row_position[:, None])
        if WINDOW >= 0:
            seen = seen & (position[None, :] >= row_position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            value_cache + slot_head[:, None] * VALUE_DIM + value_dims[None, :],
            mask=live[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None], WIDEN)
        peak = new_peak
    return peak, total, acc


@triton.jit
def start_softmax(sinks, heads, inside, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr):
    """State (peak, total) of a softmax that has seen no key, but its row's sink if there is one."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + heads, mask=inside, other=float("-inf")).to(tl.float32) * LOG2_E
        total = tl.where(inside, 1.0, 0.0)
    return peak, total


@triton.jit
def prefill_kernel(
    out, query, key_cache, value_cache, sinks, table, requests, query_tiles,
    score_scale, table_stride, query_token_stride, query_head_stride, out_token_stride,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, WIDEN: tl.constexpr,
):
    """Program (t, h): the queries of tile t, `query_tiles` [tiles, 2] = (request, first query), with KV head h.

    A tile has QUERIES queries of one chunk, times GROUP heads <= ROWS. In SWA layers its keys begin one window before
    its first query, so the work does not depend on the length of the prefix.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(query_tiles + tile * 2)
    first_query = tl.load(query_tiles + tile * 2 + 1)
    meta = requests + request * REQUEST_FIELDS
    row_start = tl.load(meta)
    seq_len = tl.load(meta + 1)
    first_block = tl.load(meta + 2)
    floor = tl.load(meta + 3)
    num_queries = tl.load(meta + REQUEST_FIELDS) - row_start

    rows = tl.arange(0, ROWS)
    index = first_query + rows // GROUP
    inside = (rows < QUERIES * GROUP) & (index < num_queries)
    head = kv_head * GROUP + rows % GROUP
    row_position = seq_len - num_queries + index
    dims = tl.arange(0, KEY_PAD)
    token = (row_start + index).to(tl.int64)
    q = tl.load(
        query + (token * query_token_stride + head * query_head_stride)[:, None] + dims[None, :],
        mask=inside[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    )
    first = floor
    if WINDOW >= 0:
        first = tl.maximum(floor, seq_len - num_queries + first_query - WINDOW)
    end = tl.minimum(seq_len, seq_len - num_queries + first_query + QUERIES)
    peak, total = start_softmax(sinks, head, inside, HAS_SINKS, ROWS)
    peak, total, acc = attend_range(
        q, peak, total, tl.zeros([ROWS, VALUE_PAD], tl.float32), row_position, first, end,
        table + request.to(tl.int64) * table_stride,
        first_block, key_cache, value_cache, kv_head,
        score_scale,
        BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, WINDOW, TILE_KEYS, WIDEN,
    )
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    dims = tl.arange(0, VALUE_PAD)
    tl.store(
        out + (token * out_token_stride + head * VALUE_DIM)[:, None] + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (dims < VALUE_DIM)[None, :],
    )


@triton.jit
def decode_kernel(
    out, partial_out, partial_lse, query, key_cache, value_cache, sinks, table, requests, decodes,
    score_scale, table_stride, query_token_stride, query_head_stride, out_token_stride,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program (d, h, s): part s of the keys of request `decodes[d]`, which has one token, with KV head h.

    One split writes the result. Several write `partial_out` [decodes, heads, splits, VALUE_DIM] and `partial_lse`
    [decodes, heads, splits] (log 2; -inf for a part without keys), without sinks, for `reduce_kernel`.
    """
    decode = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(decodes + decode)
    meta = requests + request * REQUEST_FIELDS
    token = tl.load(meta).to(tl.int64)
    seq_len = tl.load(meta + 1)
    first_block = tl.load(meta + 2)
    first = tl.load(meta + 3)
    if WINDOW >= 0:
        first = tl.maximum(first, seq_len - 1 - WINDOW)
    part = tl.cdiv(tl.cdiv(seq_len - first, NUM_SPLITS), TILE_KEYS) * TILE_KEYS
    first = first + split * part
    end = tl.minimum(seq_len, first + part)

    rows = tl.arange(0, ROWS)
    inside = rows < GROUP
    head = kv_head * GROUP + rows
    dims = tl.arange(0, KEY_PAD)
    q = tl.load(
        query + token * query_token_stride + (head * query_head_stride)[:, None] + dims[None, :],
        mask=inside[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    )
    peak, total = start_softmax(sinks, head, inside, HAS_SINKS and NUM_SPLITS == 1, ROWS)
    peak, total, acc = attend_range(
        q, peak, total, tl.zeros([ROWS, VALUE_PAD], tl.float32), tl.zeros([ROWS], tl.int32) + (seq_len - 1), first,
        end,
        table + request.to(tl.int64) * table_stride,
        first_block, key_cache, value_cache, kv_head,
        score_scale,
        BLOCK_SIZE, NUM_KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, -1, TILE_KEYS, WIDEN,
    )
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    dims = tl.arange(0, VALUE_PAD)
    mask = inside[:, None] & (dims < VALUE_DIM)[None, :]
    if NUM_SPLITS == 1:
        target = out + token * out_token_stride + (head * VALUE_DIM)[:, None] + dims[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
    else:
        part_index = (decode.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS + split
        tl.store(partial_out + part_index[:, None] * VALUE_DIM + dims[None, :], acc, mask=mask)
        lse = tl.where(total > 0.0, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part_index, lse, mask=inside)


@triton.jit
def reduce_kernel(
    out, partial_out, partial_lse, sinks, requests, decodes,
    out_token_stride,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):
    """Program (d, h): parts of decode d and head h, weighted by their share of the softmax (the sink by its own)."""
    decode = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(requests + tl.load(decodes + decode) * REQUEST_FIELDS).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, VALUE_PAD)
    part = (decode.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + splits
    lse = tl.load(partial_lse + part, mask=splits < NUM_SPLITS, other=float("-inf"))
    parts = tl.load(
        partial_out + part[:, None] * VALUE_DIM + dims[None, :],
        mask=(splits < NUM_SPLITS)[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    peak = tl.max(lse, 0)
    sink_weight = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
        sink_weight = tl.exp2(sink - peak)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0) + sink_weight
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(
        out + token * out_token_stride + head * VALUE_DIM + dims,
        result.to(out.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )
