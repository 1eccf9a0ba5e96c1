"""Decode attention over paged KV, read where it lies: one query per request, online softmax in fp32.

The keys of each request are cut into parts, and a piece of work is one part of one KV head:

    request 0, head 0   | part 0 | part 1 | part 2 |      each part: all query heads of the KV head, tile after tile
    request 0, head 1   | part 0 | part 1 | part 2 |      the thread that finishes the last part merges them

The part with a request's newest key writes that key and value into the cache before it reads them.
"""

import numpy as np

from cygnet.model.cpu.decode_vector import HEADS, KEYS, STEP, TILE, add_heads, score_heads
from cygnet.model.cpu.jit import (
    bf16_at,
    exp,
    f32_at,
    float_in,
    i32_at,
    i64_at,
    jit,
    load,
    prefetch,
    shift,
    store,
    take,
)

LINE = 32
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LOWEST = np.float32(-3.0e38)


@jit
def scores_of_key(q, key, group, dim, scores, column):
    """scores[g, column] = q[g] . key for all heads g of the group, four at a time: the key is widened once for them."""
    g = 0
    while g + 4 <= group:
        q0, q1, q2, q3 = shift(q, g * dim), shift(q, (g + 1) * dim), shift(q, (g + 2) * dim), shift(q, (g + 3) * dim)
        s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
        for i in range(dim):
            k = load(key, i)
            s0 += load(q0, i) * k
            s1 += load(q1, i) * k
            s2 += load(q2, i) * k
            s3 += load(q3, i) * k
        store(scores, g * TILE + column, s0)
        store(scores, (g + 1) * TILE + column, s1)
        store(scores, (g + 2) * TILE + column, s2)
        store(scores, (g + 3) * TILE + column, s3)
        g += 4
    while g < group:
        one, total = shift(q, g * dim), ZERO
        for i in range(dim):
            total += load(one, i) * load(key, i)
        store(scores, g * TILE + column, total)
        g += 1


@jit
def softmax_tile(scores, count, state):
    """One head's scores[0:count] become weights exp(s - max); returns what to multiply older sums with.

    `state` is (largest score, sum of weights) so far.
    """
    before = load(state, 0)
    largest = before
    for t in range(count):
        largest = max(largest, load(scores, t))
    kept = exp(before - largest)
    total = ZERO
    for t in range(count):
        weight = exp(load(scores, t) - largest)
        store(scores, t, weight)
        total += weight
    store(state, 0, largest)
    store(state, 1, load(state, 1) * kept + total)
    return kept


@jit
def add_values(values, offsets, weights, count, dim, kept, sums):
    """sums[0:dim] = sums * kept + weights[0:count] . values, four rows of values at a time."""
    if kept != ONE:
        for i in range(dim):
            store(sums, i, load(sums, i) * kept)
    t = 0
    while t + 4 <= count:
        w0, w1, w2, w3 = load(weights, t), load(weights, t + 1), load(weights, t + 2), load(weights, t + 3)
        v0, v1 = shift(values, offsets[t]), shift(values, offsets[t + 1])
        v2, v3 = shift(values, offsets[t + 2]), shift(values, offsets[t + 3])
        for i in range(dim):
            store(sums, i, load(sums, i) + w0 * load(v0, i) + w1 * load(v1, i) + w2 * load(v2, i) + w3 * load(v3, i))
        t += 4
    while t < count:
        w0, v0 = load(weights, t), shift(values, offsets[t])
        for i in range(dim):
            store(sums, i, load(sums, i) + w0 * load(v0, i))
        t += 1


@jit
def row_of(table, position, block_size, kv_heads, head):
    """Row of the cache, seen as [slots * kv_heads, dim], that has a position's key or value."""
    return (table[position // block_size] * block_size + position % block_size) * kv_heads + head


@jit
def fetch(row, dim):
    """Ask for row[0:dim], a cache line of bf16 at a time (every other one of fp32: its pair comes along)."""
    for i in range(0, dim, LINE):
        prefetch(row, i)


@jit
def begin_part(group, dim, sums, states):
    """No keys yet: `sums` [group, dim] and `states` [group, 2]."""
    for g in range(group):
        store(states, 2 * g, LOWEST)
        store(states, 2 * g + 1, ZERO)
    for i in range(group * dim):
        store(sums, i, ZERO)


@jit
def attend_part(p, keys, values, begin, end, table, head, query, sums, states, scratch):
    """Positions begin..end-1 of one request and KV head: fills `sums` [group, value_dim] and `states` [group, 2].

    `query` T [group, key_dim]; `table` is the request's row of block ids, less its first block. Scratch: [row offsets
    int64 [TILE] | scaled query fp32 [group, key_dim] | scores fp32 [group, TILE]].
    """
    block_size, kv_heads, group, key_dim, value_dim = p[12], p[13], p[14], p[15], p[16]
    offsets, q, scale = i64_at(scratch), f32_at(scratch + 8 * TILE), float_in(p, 20)
    scores = shift(q, group * key_dim)
    for i in range(group * key_dim):
        store(q, i, load(query, i) * scale)
    begin_part(group, value_dim, sums, states)
    for first in range(begin, end, TILE):
        count = min(TILE, end - first)
        for t in range(count):
            row = row_of(table, first + t, block_size, kv_heads, head)
            ahead = row_of(table, min(first + t + TILE, end - 1), block_size, kv_heads, head)
            # Blocks lie anywhere, so the hardware can't guess what comes next.
            fetch(shift(values, row * value_dim), value_dim)
            fetch(shift(keys, ahead * key_dim), key_dim)
            offsets[t] = row * value_dim
            scores_of_key(q, shift(keys, row * key_dim), group, key_dim, scores, t)
        for g in range(group):
            weights = shift(scores, g * TILE)
            kept = softmax_tile(weights, count, shift(states, 2 * g))
            add_values(values, offsets, weights, count, value_dim, kept, shift(sums, g * value_dim))


@jit
def find_rows(p, table, head, first, count, offsets):
    """Rows of the cache with `count` positions from `first` on; repeats the last up to a multiple of KEYS."""
    block_size, kv_heads = p[12], p[13]
    block, place = first // block_size, first % block_size
    row = (table[block] * block_size + place) * kv_heads + head
    for t in range(count):
        offsets[t] = row
        place += 1
        row += kv_heads
        if place == block_size and t + 1 < count:
            block, place = block + 1, 0
            row = table[block] * block_size * kv_heads + head
    for t in range(count, (count + KEYS - 1) // KEYS * KEYS):
        offsets[t] = offsets[count - 1]


@jit
def pair_weights(scores, count, words):
    """The weights scores[0:count] in bf16, with a 0 behind an odd number."""
    for t in range(count):
        store(words, t, load(scores, t))
    if count % 2:
        store(words, count, ZERO)


@jit
def attend_part_in_pairs(p, keys, values, begin, end, table, head, query, sums, states, scratch):
    """`attend_part` for bf16 with products of pairs: of a key's neighbouring elements, then of neighbouring keys.

    Scratch: [rows int64 [TILE] | next rows int64 [TILE] | scores fp32 [group, TILE] | kept fp32 [group] | weights bf16
    [group, TILE]].
    """
    group, key_dim, value_dim, scale = p[14], p[15], p[16], float_in(p, 20)
    rows, following, scores = i64_at(scratch), i64_at(scratch + 8 * TILE), f32_at(scratch + 16 * TILE)
    kept = shift(scores, group * TILE)
    weights = scratch + 16 * TILE + 4 * (group * TILE + group)
    begin_part(group, value_dim, sums, states)
    for t in range(TILE):
        following[t] = 0
    if begin < end:
        find_rows(p, table, head, begin, min(TILE, end - begin), rows)
    for first in range(begin, end, TILE):
        count, after = min(TILE, end - first), min(TILE, end - first - TILE)
        if after > 0:
            find_rows(p, table, head, first + TILE, after, following)
        for t in range(0, count, KEYS):
            for g in range(0, group, HEADS):
                score_heads(min(HEADS, group - g), shift(query, g * key_dim), keys, shift(rows, t), key_dim, scale,
                            shift(scores, g * TILE + t), values, shift(following, t), value_dim)  # fmt: skip
        for g in range(group):
            mine = shift(scores, g * TILE)
            store(kept, g, softmax_tile(mine, count, shift(states, 2 * g)))
            pair_weights(mine, count, bf16_at(weights + 2 * TILE * g))
        for g in range(0, group, HEADS):
            add_heads(min(HEADS, group - g), values, rows, (count + 1) // 2, i32_at(weights + 2 * TILE * g), value_dim,
                      shift(kept, g), shift(sums, g * value_dim), keys, following, key_dim)  # fmt: skip
        rows, following = following, rows


@jit
def finish(sums, states, stride, parts, sinks, g, group, dim, out):
    """out[0:dim] of head g from its `parts`, which lie `stride` floats apart, and its sink, if `sinks` is not 0."""
    largest, total = LOWEST, ZERO
    for part in range(parts):
        largest = max(largest, load(states, part * stride + 2 * g))
    if sinks != 0:
        largest = max(largest, load(f32_at(sinks), g))
        total = exp(load(f32_at(sinks), g) - largest)
    for part in range(parts):
        total += load(states, part * stride + 2 * g + 1) * exp(load(states, part * stride + 2 * g) - largest)
    first = shift(sums, g * dim)
    for part in range(parts):
        factor = exp(load(states, part * stride + 2 * g) - largest) / total
        added = shift(first, part * stride)
        if part == 0:
            for i in range(dim):
                store(first, i, load(first, i) * factor)
        else:
            for i in range(dim):
                store(first, i, load(first, i) + load(added, i) * factor)
    for i in range(dim):
        store(out, i, load(first, i))


@jit
def write_newest(p, keys, values, key, value, slot, row, head):
    """The step's own key and value of one head, into their slot."""
    kv_heads, key_dim, value_dim = p[13], p[15], p[16]
    source, target = shift(key, (row * kv_heads + head) * key_dim), shift(keys, (slot * kv_heads + head) * key_dim)
    for i in range(key_dim):
        store(target, i, load(source, i))
    source = shift(value, row * p[21] + head * value_dim)
    target = shift(values, (slot * kv_heads + head) * value_dim)
    for i in range(value_dim):
        store(target, i, load(source, i))


def _decode_with(attend):
    """The kernel's work with `attend` for each part."""

    @jit
    def decode(p, keys, values, query, key, value, out):
        """Decode rows of a step.

        p[2], p[3] the cache's `keys`, `values` [slots, kv_heads, dim] of T, or bf16 where T is fp32; p[4] `query` T
        [rows, heads, key_dim]; p[5], p[6] the step's `key`, `value`; p[7] `out` T [rows, heads, value_dim]; p[8] sinks
        fp32 [heads] or 0.
        p[9] int64 [requests, 6]: row, slot to write (-1: none), first key, end of keys, address of the block ids, block
        of its column 0. p[10] requests, p[11] parts per request, p[12] block_size, p[13] kv_heads, p[14] heads per KV
        head, p[15] key_dim, p[16] value_dim, p[17] scratch fp32, p[18] floats of a part, p[19] parts done int64
        [requests * kv_heads], all 0 before and after; p[20] the scale; p[21] elements between the rows of `value`.

        Scratch begins with the parts ([sums | states] each), then has room for `attend` per thread.
        """
        requests, parts, kv_heads, group, key_dim, value_dim = p[10], p[11], p[13], p[14], p[15], p[16]
        stride = p[18]
        per_thread = (group * (max(key_dim, 2 * TILE) + TILE) + 4 * TILE + 15) // 16 * 16
        mine = p[17] + 4 * (requests * kv_heads * parts * stride + take(p, 1) * per_thread)
        while True:
            piece = take(p, 0)
            if piece >= requests * kv_heads * parts:
                break
            pair, part = piece // parts, piece % parts
            request, head = pair // kv_heads, pair % kv_heads
            info = shift(i64_at(p[9]), request * 6)
            row, first, end = info[0], info[2], info[3]
            per_part = (end - first + parts - 1) // parts
            begin, stop = min(end, first + part * per_part), min(end, first + (part + 1) * per_part)
            if begin < stop and stop == end and info[1] >= 0:
                write_newest(p, keys, values, key, value, info[1], row, head)
            first_row = (row * kv_heads + head) * group
            sums = shift(f32_at(p[17]), piece * stride)
            states = shift(sums, group * value_dim)
            table = shift(i64_at(info[4]), -info[5])
            attend(p, keys, values, begin, stop, table, head, shift(query, first_row * key_dim), sums, states, mine)
            if take(i64_at(p[19]), pair) == parts - 1:
                i64_at(p[19])[pair] = 0
                sums = shift(f32_at(p[17]), pair * parts * stride)
                states = shift(sums, group * value_dim)
                sinks = 0 if p[8] == 0 else p[8] + 4 * head * group
                for g in range(group):
                    finish(
                        sums, states, stride, parts, sinks, g, group, value_dim, shift(out, (first_row + g) * value_dim)
                    )

    return decode


_decode_alone, _decode_in_pairs = _decode_with(attend_part), _decode_with(attend_part_in_pairs)


def decode_bf16(p):
    keys, values, query, key, value = bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]), bf16_at(p[5]), bf16_at(p[6])
    if p[15] % STEP == 0 and p[16] % STEP == 0:
        _decode_in_pairs(p, keys, values, query, key, value, bf16_at(p[7]))
    else:
        _decode_alone(p, keys, values, query, key, value, bf16_at(p[7]))


def decode_f32(p):
    _decode_alone(p, f32_at(p[2]), f32_at(p[3]), f32_at(p[4]), f32_at(p[5]), f32_at(p[6]), f32_at(p[7]))


def decode_narrow_f32(p):
    """With KV in bf16."""
    _decode_alone(p, bf16_at(p[2]), bf16_at(p[3]), f32_at(p[4]), f32_at(p[5]), f32_at(p[6]), f32_at(p[7]))
