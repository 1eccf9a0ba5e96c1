"""Attention of chunks of several tokens over paged KV, read where it lies: tiles, online softmax in fp32.

A piece of work is some panels of `ROWS` rows, the query heads of one KV head folded into them query after query, with
all keys that they see, tile after tile:

    keys of a tile      located in the cache; their values packed once for all panels
    panel by panel      scores, mask at the edges of what a row sees, softmax, sums

Tiles lie at multiples of `TILE`, and a row's result depends on no other row: it is the same to the bit however a
prompt is cut into chunks and however many threads there are.
"""

import numpy as np

from cygnet.model.cpu.chunk_layout import BLOCK, FIELDS, KEYS, PANELS, ROWS, STATE, TILE
from cygnet.model.cpu.chunk_vector import (
    add_values,
    pack_queries,
    pack_values,
    pointer_like,
    score_keys,
    weigh,
    write_block,
)
from cygnet.model.cpu.jit import (
    bf16_at,
    exp,
    f32_at,
    float_in,
    i8_at,
    i32_at,
    i64_at,
    jit,
    load,
    prefetch,
    shift,
    store,
    take,
)

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LOWEST = np.float32(-3.0e38)
HIDDEN = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LINE = 64
"""Bytes of a cache line."""
LN_2 = np.float32(0.6931471805599453)


@jit
def padded(size):
    return (size + BLOCK - 1) // BLOCK * BLOCK


@jit
def locate(p, piece, tile, low, high, cached_size, nothing, rows_at):
    """Addresses of the keys, then of the values, at positions tile .. tile + TILE - 1.

    `nothing` stands for those outside low .. high - 1.
    """
    block_size, kv_heads, key_dim, value_dim = p[11], p[12], p[14], p[15]
    table = shift(i64_at(piece[6]), -piece[7])
    for t in range(2 * TILE):
        rows_at[t] = nothing
    first = max(low, tile)
    block, offset = first // block_size, first % block_size
    for position in range(first, min(high, tile + TILE)):
        row = (table[block] * block_size + offset) * kv_heads + piece[3]
        rows_at[position - tile] = p[2] + row * key_dim * cached_size
        rows_at[TILE + position - tile] = p[3] + row * value_dim * cached_size
        offset += 1
        if offset == block_size:
            offset = 0
            block += 1


@jit
def pack_tile(values_at, begin, end, dim, size, values, cached_size, cached):
    """Values of the tile's keys begin .. end - 1 into `values` [blocks, steps of a tile, BLOCK]."""
    per_step = 4 // size
    whole = dim // BLOCK
    for step in range(begin // per_step, end // per_step):
        at, target = shift(values_at, step * per_step), shift(values, step * BLOCK * per_step)
        for block in range(whole):
            pack_values(at, block * BLOCK * cached_size, shift(target, block * TILE * BLOCK), cached)
        if whole * BLOCK < dim:
            target = shift(target, whole * TILE * BLOCK)
            for key in range(per_step):
                source = pointer_like(cached, at[key])
                for i in range(BLOCK):
                    here = whole * BLOCK + i
                    store(target, i * per_step + key, load(source, here) if here < dim else ZERO)


@jit
def place_rows(p, piece, first, base, row_size, at, queries):
    """Addresses of the rows `first` .. of a piece's chunk behind `base`, and the numbers of their queries.

    Rows after the piece's last repeat it.
    """
    kv_heads, group = p[12], p[13]
    number, g = first // group, first % group
    for r in range(ROWS):
        queries[r] = np.int32(number)
        at[r] = base + (((piece[0] + number) * kv_heads + piece[3]) * group + g) * row_size
        if first + r + 1 < piece[1] + piece[2]:
            g += 1
            if g == group:
                g = 0
                number += 1


@jit
def pack_panel(p, piece, first, size, at, queries, sees):
    """Rows `first` .. of a piece's chunk into `queries` [steps, ROWS], the queries' numbers into `sees`.

    Rows after the last repeat it.
    """
    dim = p[14]
    place_rows(p, piece, first, p[4], dim * size, at, sees)
    steps = dim * size // 4
    whole = steps // BLOCK * BLOCK
    for half in range(0, ROWS, BLOCK):
        for step in range(0, whole, BLOCK):
            pack_queries(shift(at, half), step * 4, shift(queries, (step * ROWS + half) * 4 // size))
    per_step = 4 // size
    for r in range(ROWS):
        source = pointer_like(queries, at[r])
        for i in range(whole * per_step, dim):
            store(queries, (i // per_step * ROWS + r) * per_step + i % per_step, load(source, i))


@jit
def mask(scores, begin, end, low, ahead, window, sees):
    """Hide the tile's keys begin .. end - 1 from rows that don't see them, and those before `low` from all.

    Key k is `ahead` + k tokens after query 0 of the chunk.
    """
    for k in range(begin, end):
        row, place = shift(scores, (k - begin) * ROWS), np.int32(ahead + k)
        if k < low:
            for r in range(ROWS):
                store(row, r, HIDDEN)
        else:
            for r in range(ROWS):
                behind = sees[r] - place
                store(row, r, load(row, r) if behind >= 0 and behind <= window else HIDDEN)


@jit
def rescale(sums, kept, dims):
    for d in range(dims):
        row = shift(sums, d * ROWS)
        for r in range(ROWS):
            store(row, r, load(row, r) * load(kept, r))


@jit
def fetch(rows_at, begin, end, row_bytes):
    """Ask for the rows begin .. end - 1."""
    for t in range(begin, end):
        for i in range(0, row_bytes, LINE):
            prefetch(i8_at(rows_at[t]), i)


@jit
def attend_panel(
    p, piece, first, tile, size, rows_at, ahead, share, queries, sees, state, scores, weights, values, sums,
    cached_size, cached,
):  # fmt: skip
    """One tile of keys for one panel, whose first row is `first`.

    Meanwhile asks for a part of the rows that `ahead` tells the addresses of, `share` per `KEYS` keys.
    """
    group, key_dim, value_dim, window = p[13], p[14], p[15], p[16]
    oldest, newest = first // group, (min(first + ROWS, piece[1] + piece[2]) - 1) // group
    low, high = max(piece[5], piece[4] + oldest - window), piece[4] + newest + 1
    begin, end = max(low, tile) - tile, min(high, tile + TILE) - tile
    if begin >= end:
        return
    begin, end = begin // KEYS * KEYS, (end + KEYS - 1) // KEYS * KEYS
    for k in range(begin, end, KEYS):
        score_keys(queries, shift(rows_at, k), key_dim * cached_size // 4, shift(scores, (k - begin) * ROWS), cached)
        fetch(ahead, k // KEYS * share, (k // KEYS + 1) * share, max(key_dim, value_dim) * cached_size)
    seen_by_all = tile + begin >= max(piece[5], piece[4] + newest - window) and tile + end <= piece[4] + oldest + 1
    if not seen_by_all:
        mask(scores, begin, end, low - tile, tile - piece[4], np.int32(window), sees)
    grew = weigh(scores, end - begin, state, float_in(p, 17) * LOG2_E, weights)
    if tile <= low:
        for i in range(padded(value_dim) * ROWS):
            store(sums, i, ZERO)
    elif grew != 0:
        rescale(sums, shift(state, 2 * ROWS), value_dim)
    per_step = 4 // size
    for d in range(0, value_dim, KEYS):
        place = (d // BLOCK * TILE * BLOCK) + (begin * BLOCK) + d % BLOCK * per_step
        add_values(weights, (end - begin) // per_step, shift(values, place), shift(sums, d * ROWS))


@jit
def finish(p, piece, first, size, state, at, sees, sums, like):
    """Sums of a panel, divided by the rows' sums of weights with their sinks, into the output."""
    group, dim = p[13], p[15]
    factors = shift(state, 2 * ROWS)
    for r in range(ROWS):
        largest, kept, total = load(state, r), ONE, load(state, ROWS + r)
        if p[6] != 0:
            row = min(first + r, piece[1] + piece[2] - 1)
            sink = load(f32_at(p[6]), piece[3] * group + row % group) * LOG2_E
            most = max(largest, sink)
            kept = exp((largest - most) * LN_2)
            total = total * kept + exp((sink - most) * LN_2)
        store(factors, r, kept / total)
    place_rows(p, piece, first, p[5], dim * size, at, sees)
    whole = dim // BLOCK * BLOCK
    for d in range(0, whole, BLOCK):
        for half in range(0, ROWS, BLOCK):
            write_block(shift(sums, d * ROWS + half), shift(factors, half), shift(at, half), d * size, like)
    for r in range(ROWS):
        for d in range(whole, dim):
            store(pointer_like(like, at[r]), d, load(sums, d * ROWS + r) * load(factors, r))


@jit
def attend_piece(p, piece, size, mine, like, cached_size, cached):
    """A whole piece; `mine` is the address of the thread's scratch, laid out as `scratch_floats` counts it."""
    group, key_dim, value_dim = p[13], p[14], p[15]
    num_steps, num_dims = padded(key_dim * size // 4), padded(value_dim)
    at, sees = mine + 32 * TILE, mine + 32 * TILE + 8 * ROWS
    states = sees + 4 * PANELS * ROWS
    scores = states + 4 * PANELS * STATE
    weights = scores + 4 * TILE * ROWS
    values = weights + 4 * TILE * ROWS
    nothing = values + 4 * TILE * num_dims
    queries = nothing + 4 * max(num_dims, padded(key_dim))
    sums = queries + 4 * PANELS * num_steps * ROWS
    panels = (piece[2] + ROWS - 1) // ROWS
    share = 2 * KEYS // panels
    for i in range(max(num_dims, padded(key_dim))):
        store(f32_at(nothing), i, ZERO)
    for n in range(panels):
        packed = pointer_like(like, queries + 4 * n * num_steps * ROWS)
        pack_panel(p, piece, piece[1] + n * ROWS, size, i64_at(at), packed, i32_at(sees + 4 * n * ROWS))
        for r in range(ROWS):
            store(f32_at(states), n * STATE + r, LOWEST)
            store(f32_at(states), n * STATE + ROWS + r, ZERO)
    low = max(piece[5], piece[4] + piece[1] // group - p[16])
    high = piece[4] + (piece[1] + piece[2] - 1) // group + 1
    here, ahead = i64_at(mine), i64_at(mine + 16 * TILE)
    tile = low // TILE * TILE
    locate(p, piece, tile, low, high, cached_size, nothing, here)
    while tile < high:
        begin, end = max(low - tile, 0) // KEYS * KEYS, min(high - tile + KEYS - 1, TILE) // KEYS * KEYS
        packed = pointer_like(like, values)
        pack_tile(shift(here, TILE), begin, end, value_dim, size, packed, cached_size, cached)
        locate(p, piece, tile + TILE, low, high, cached_size, nothing, ahead)
        for n in range(panels):
            attend_panel(
                p,
                piece,
                piece[1] + n * ROWS,
                tile,
                size,
                here,
                shift(ahead, n * 2 * TILE // panels),
                share,
                pointer_like(like, queries + 4 * n * num_steps * ROWS),
                i32_at(sees + 4 * n * ROWS),
                shift(f32_at(states), n * STATE),
                f32_at(scores),
                pointer_like(like, weights),
                pointer_like(like, values),
                shift(f32_at(sums), n * num_dims * ROWS),
                cached_size,
                cached,
            )
        tile += TILE
        here, ahead = ahead, here
    for n in range(panels):
        state, panel_sums = shift(f32_at(states), n * STATE), shift(f32_at(sums), n * num_dims * ROWS)
        finish(p, piece, piece[1] + n * ROWS, size, state, i64_at(at), i32_at(sees), panel_sums, like)


@jit
def write(p, key, value, keys, values):
    """The step's own keys and values into their slots.

    p[2] `key` T [rows, key_size], p[3] `value` T [rows, value_size], p[4], p[5] the cache's `keys`, `values` [slots,
    key_size or value_size], of T or bf16; p[6] slots int64 [rows], -1: not written. p[7] rows, p[8] rows per piece,
    p[9] key_size, p[10] value_size, p[11] elements between the rows of `value`.
    """
    key_size, value_size = p[9], p[10]
    while True:
        first = take(p, 0) * p[8]
        if first >= p[7]:
            break
        for row in range(first, min(first + p[8], p[7])):
            slot = i64_at(p[6])[row]
            if slot >= 0:
                source, target = shift(key, row * key_size), shift(keys, slot * key_size)
                for i in range(key_size):
                    store(target, i, load(source, i))
                source, target = shift(value, row * p[11]), shift(values, slot * value_size)
                for i in range(value_size):
                    store(target, i, load(source, i))


@jit
def chunks(p, size, like, cached_size, cached):
    """Chunks of a step.

    p[2], p[3] the cache's keys, values C [slots, kv_heads, dim], the step's own among them; p[4] `query` T [rows,
    heads, key_dim]; p[5] `out` T [rows, heads, value_dim]; p[6] sinks fp32 [heads] or 0.
    p[7] int64 [pieces, FIELDS]: the chunk's first row of `query`; the piece's first row in the folded chunk, its rows
    (up to PANELS * ROWS), its KV head; position of the chunk's first query, first key; address of the block ids, block
    of column 0. p[8] pieces; p[9] scratch fp32, p[10] floats of it per thread; p[11] block_size, p[12] kv_heads, p[13]
    heads per KV head, p[14] key_dim (even for C bf16), p[15] value_dim; p[16] window, below 2^31; p[17] the
    scale, above 0.
    `size` is that of T; `like` any pointer to T. C is T, or bf16 where T is fp32.
    """
    mine = p[9] + 4 * p[10] * take(p, 1)
    while True:
        number = take(p, 0)
        if number >= p[8]:
            break
        attend_piece(p, shift(i64_at(p[7]), number * FIELDS), size, mine, like, cached_size, cached)


def chunks_bf16(p):
    chunks(p, 2, bf16_at(0), 2, bf16_at(0))


def chunks_f32(p):
    chunks(p, 4, f32_at(0), 4, f32_at(0))


def chunks_narrow_f32(p):
    """With KV in bf16."""
    chunks(p, 4, f32_at(0), 2, bf16_at(0))


def write_bf16(p):
    write(p, bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), bf16_at(p[5]))


def write_f32(p):
    write(p, f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), f32_at(p[5]))


def write_narrow_f32(p):
    write(p, f32_at(p[2]), f32_at(p[3]), bf16_at(p[4]), bf16_at(p[5]))
