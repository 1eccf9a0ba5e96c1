"""Products of a few rows with a large matrix, bound by how fast the matrix is read; the choice of the best logit."""

import numpy as np

from cygnet.model.cpu.jit import bf16_at, f32_at, i8_at, i64_at, jit, load, order, shift, store, take

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
FIRST = -(1 << 31)


@jit
def put(p, y, row, out, value):
    """y[row, out] = value * scale + bias."""
    if p[4] != 0:
        value *= load(f32_at(p[4]), out)
    if p[5] != 0:
        value += load(f32_at(p[5]), out)
    store(y, row * p[8] + out, value)


@jit
def multiply(p, x, weight, y):
    """y = x W^T * scale + bias for a few rows.

    p[2] `x` T [rows, in]; p[3] `weight` int8 [out, in]; p[4] scale fp32 [out] or 0; p[5] bias fp32 [out] or 0; p[6] `y`
    T [rows, out]; p[7] rows, p[8] out, p[9] in, p[10] outputs per piece; p[11] scratch fp32 [threads, rows * in].
    """
    rows, outs, size, per_piece = p[7], p[8], p[9], p[10]
    wide = shift(f32_at(p[11]), take(p, 1) * rows * size)
    for i in range(rows * size):
        store(wide, i, load(x, i))
    while True:
        start = take(p, 0) * per_piece
        if start >= outs:
            break
        for out in range(start, min(start + per_piece, outs)):
            w = shift(weight, out * size)
            row = 0
            while row + 4 <= rows:
                x0, x1 = shift(wide, row * size), shift(wide, (row + 1) * size)
                x2, x3 = shift(wide, (row + 2) * size), shift(wide, (row + 3) * size)
                s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
                for i in range(size):
                    factor = load(w, i)
                    s0 += factor * load(x0, i)
                    s1 += factor * load(x1, i)
                    s2 += factor * load(x2, i)
                    s3 += factor * load(x3, i)
                put(p, y, row, out, s0)
                put(p, y, row + 1, out, s1)
                put(p, y, row + 2, out, s2)
                put(p, y, row + 3, out, s3)
                row += 4
            while row < rows:
                x0, s0 = shift(wide, row * size), ZERO
                for i in range(size):
                    s0 += load(w, i) * load(x0, i)
                put(p, y, row, out, s0)
                row += 1


@jit
def best(p, x):
    """Largest element of every part of every row, and the first place that has it.

    p[2] `x` T [rows, size]; p[3] int64 [rows, parts, 2] for (order of the value, place); p[4] rows, p[5] size, p[6]
    parts, p[7] elements of a part. NaN counts as largest.
    """
    rows, size, parts, length = p[4], p[5], p[6], p[7]
    while True:
        piece = take(p, 0)
        if piece >= rows * parts:
            break
        row, begin = shift(x, piece // parts * size), piece % parts * length
        end = min(begin + length, size)
        largest = np.int32(FIRST)
        for i in range(begin, end):
            largest = max(largest, order(row, i))
        place = begin
        while place < end - 1 and order(row, place) != largest:
            place += 1
        result = shift(i64_at(p[3]), 2 * piece)
        result[0] = np.int64(largest)
        result[1] = place


def multiply_i8_bf16(p):
    multiply(p, bf16_at(p[2]), i8_at(p[3]), bf16_at(p[6]))


def multiply_i8_f32(p):
    multiply(p, f32_at(p[2]), i8_at(p[3]), f32_at(p[6]))


def best_bf16(p):
    best(p, bf16_at(p[2]))


def best_f32(p):
    best(p, f32_at(p[2]))
