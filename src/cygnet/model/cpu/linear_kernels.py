"""Products of a few rows with matrices in panels (`vector`), bound by reading the matrix; rounding to bytes.

Rows of activations go through in groups of four; a panel stays in the cache for all of them.
"""

import numpy as np

from cygnet.model.cpu.jit import as_float, bf16_at, f32_at, i8_at, i16_at, i32_at, jit, load, shift, store, take
from cygnet.model.cpu.panel_layout import MANY_ROWS, PANEL, ROW_BLOCK, ROWS, STRETCH, WIDENED_SCRATCH
from cygnet.model.cpu.vector import bf16_panel, float_panel, i8_panel, widened_panel

ZERO = np.float32(0.0)
LIMIT = np.float32(127.0)
TINY = np.float32(1e-20)
LINE = 64
"""Bytes of a cache line. While the rows of one panel are multiplied, the next one is fetched, group by group."""
SEGMENT = 1024
"""Inputs whose products fit 32 bits together: 1024 * 127 * 16512 < 2 ** 31."""
MOST = (2**31 - 1) // 127

ENOUGH = 64
"""Rows from which on widening a panel once is faster than with every few of them."""

_bf16_1, _bf16_2, _bf16_3, _bf16_4 = bf16_panel(1), bf16_panel(2), bf16_panel(3), bf16_panel(4)
_i8_1, _i8_2, _i8_3, _i8_4 = i8_panel(1), i8_panel(2), i8_panel(3), i8_panel(4)
_wide_1, _wide_2, _wide_3, _wide_4 = widened_panel(1), widened_panel(2), widened_panel(3), widened_panel(4)
_float_many = float_panel(MANY_ROWS)


@jit
def panel_of_bf16(x, stride, weight, pairs, rows, sums, ahead):
    """sums fp32 [rows, PANEL] of up to ROWS rows of pairs `x`."""
    if rows == 1:
        _bf16_1(x, stride, weight, pairs, sums, ahead)
    elif rows == 2:
        _bf16_2(x, stride, weight, pairs, sums, ahead)
    elif rows == 3:
        _bf16_3(x, stride, weight, pairs, sums, ahead)
    else:
        _bf16_4(x, stride, weight, pairs, sums, ahead)


@jit
def panel_of_i8(x, stride, weight, pairs, rows, sums, ahead):
    """sums int32 [rows, PANEL] of up to ROWS rows of pairs `x`."""
    if rows == 1:
        _i8_1(x, stride, weight, pairs, sums, ahead)
    elif rows == 2:
        _i8_2(x, stride, weight, pairs, sums, ahead)
    elif rows == 3:
        _i8_3(x, stride, weight, pairs, sums, ahead)
    else:
        _i8_4(x, stride, weight, pairs, sums, ahead)


@jit
def panel_widened(x, stride, weight, pairs, rows, sums, ahead):
    """sums fp32 [rows, PANEL] += up to ROWS rows of fp32 `x` times a panel of bf16."""
    if rows == 1:
        _wide_1(x, stride, weight, pairs, sums, ahead)
    elif rows == 2:
        _wide_2(x, stride, weight, pairs, sums, ahead)
    elif rows == 3:
        _wide_3(x, stride, weight, pairs, sums, ahead)
    else:
        _wide_4(x, stride, weight, pairs, sums, ahead)


@jit
def copy_panel(source, source_stride, target, target_stride, rows, width):
    """target[r, 0:width] = source[r, 0:width]"""
    for r in range(rows):
        one, other = shift(source, r * source_stride), shift(target, r * target_stride)
        for j in range(width):
            store(other, j, load(one, j))


@jit
def start_sums(y, outs, first, width, rows, bias, has_bias):
    """y[0:rows, first : first + width] = bias, or 0"""
    for r in range(rows):
        out = shift(y, r * outs + first)
        for j in range(width):
            store(out, j, load(bias, first + j) if has_bias else ZERO)


@jit
def widen_panel(weight, pairs, wide):
    """wide fp32 [2 * pairs, PANEL] = a panel of bf16 in pairs"""
    for pair in range(pairs):
        words, target = shift(weight, pair * PANEL), shift(wide, 2 * pair * PANEL)
        for j in range(PANEL):
            store(target, j, as_float(np.int32(words[j] << 16)))
            store(target, PANEL + j, as_float(np.int32(words[j] & -65536)))


def multiply_widened_f32(p):
    """y = x W^T + bias of fp32 and bf16, for any number of rows.

    p[2] `x` fp32 [rows, padded]; p[3] `weight` bf16 panels of `padded` inputs; p[4] bias fp32 [out] or 0; p[5] `y` fp32
    [rows, out]; p[6] rows, p[7] out, p[8] padded; p[9] panels per piece; p[10] scratch, WIDENED_SCRATCH bytes of it per
    thread: [sums | a stretch of a panel in fp32]. A sum is the same whatever other rows there are.
    """
    rows, outs, size, per_piece = p[6], p[7], p[8], p[9]
    mine, x, y, bias = p[10] + WIDENED_SCRATCH * take(p, 1), f32_at(p[2]), f32_at(p[5]), f32_at(p[4])
    sums, wide = f32_at(mine), f32_at(mine + 4 * MANY_ROWS * PANEL)
    panels = (outs + PANEL - 1) // PANEL
    runs, blocks = (panels + per_piece - 1) // per_piece, (rows + ROW_BLOCK - 1) // ROW_BLOCK
    while True:
        piece = take(p, 0)
        if piece >= runs * blocks:
            break
        begin, start = piece // runs * ROW_BLOCK, piece % runs * per_piece
        stop, end = min(begin + ROW_BLOCK, rows), min(start + per_piece, panels)
        many = begin + (stop - begin) // MANY_ROWS * MANY_ROWS if stop - begin >= ENOUGH else begin
        for panel in range(start, end):
            first, ahead = panel * PANEL, 2 * PANEL * size if panel + 1 < end else 0
            width = min(PANEL, outs - first)
            start_sums(shift(y, begin * outs), outs, first, width, stop - begin, bias, p[4] != 0)
            for at in range(0, size, STRETCH):
                weight, pairs = i32_at(p[3] + 2 * PANEL * (size * panel + at)), min(STRETCH, size - at) // 2
                if many > begin:
                    widen_panel(weight, pairs, wide)
                for row in range(begin, many, MANY_ROWS):
                    out = shift(y, row * outs + first)
                    copy_panel(out, outs, sums, PANEL, MANY_ROWS, width)
                    _float_many(shift(x, row * size + at), size, wide, 2 * pairs, sums, 0)
                    copy_panel(sums, PANEL, out, outs, MANY_ROWS, width)
                for row in range(many, stop, ROWS):
                    count, line = min(ROWS, stop - row), row % (4 * ROWS) // ROWS * LINE
                    out = shift(y, row * outs + first)
                    copy_panel(out, outs, sums, PANEL, count, width)
                    panel_widened(shift(x, row * size + at), size, weight, pairs, count, sums, ahead + line)
                    copy_panel(sums, PANEL, out, outs, count, width)


def multiply_packed_bf16(p):
    """y = x W^T + bias.

    p[2] `x` bf16 [rows, in]; p[3] `weight` bf16 panels; p[4] bias fp32 [out] or 0; p[5] `y` bf16 [rows, out]; p[6]
    rows, p[7] out, p[8] in; p[9] panels per piece; p[10] scratch fp32 [threads, ROWS * PANEL]. `out` is a multiple of
    PANEL, `in` of 2.
    """
    rows, outs, size, per_piece = p[6], p[7], p[8], p[9]
    sums = f32_at(p[10] + 4 * ROWS * PANEL * take(p, 1))
    pairs, panels, bias = size // 2, outs // PANEL, f32_at(p[4])
    while True:
        start = take(p, 0) * per_piece
        if start >= panels:
            break
        end = min(start + per_piece, panels)
        for panel in range(start, end):
            ahead = 2 * PANEL * size if panel + 1 < end else 0
            weight = i32_at(p[3] + 2 * PANEL * size * panel)
            for row in range(0, rows, ROWS):
                count = min(ROWS, rows - row)
                panel_of_bf16(
                    i32_at(p[2] + 2 * size * row),
                    pairs,
                    weight,
                    pairs,
                    count,
                    sums,
                    ahead + row % (4 * ROWS) // ROWS * LINE,
                )
                for r in range(count):
                    out, done = bf16_at(p[5] + 2 * ((row + r) * outs + panel * PANEL)), shift(sums, r * PANEL)
                    if p[4] == 0:
                        for j in range(PANEL):
                            store(out, j, load(done, j))
                    else:
                        for j in range(PANEL):
                            store(out, j, load(done, j) + load(bias, panel * PANEL + j))


@jit
def round_rows(x, rows, size, padded, rounded, scales):
    """Rows of `x` as int16 with a scale each, as fine as the sums of a segment allow; odd sizes are padded with 0.

    A row with a NaN or infinity has the scale NaN.
    """
    most = np.float32(min(32767, MOST // min(padded, SEGMENT)))
    for r in range(rows):
        source, target = shift(x, r * size), shift(rounded, r * padded)
        largest, strange = ZERO, ZERO
        for i in range(size):
            value = load(source, i)
            largest = max(largest, abs(value))
            strange += value * ZERO
        largest = max(largest, TINY)
        factor = most / largest
        for i in range(size):
            target[i] = np.int16(np.rint(load(source, i) * factor))
        if padded > size:
            target[size] = 0
        store(scales, r, largest / most + strange)


@jit
def panel_in_segments(x, stride, weight, pairs, rows, sums, totals, ahead):
    """totals fp32 [rows, PANEL] = int16 rows times a panel of bytes; `sums` int32 [rows, PANEL] is scratch."""
    for first in range(0, pairs, SEGMENT // 2):
        count = min(SEGMENT // 2, pairs - first)
        panel_of_i8(shift(x, first), stride, shift(weight, 2 * PANEL * first), count, rows, sums, ahead)
        for j in range(rows * PANEL):
            value = np.float32(sums[j])
            store(totals, j, value if first == 0 else load(totals, j) + value)


@jit
def scale_and_add(p, y, row, panel, totals, row_scale):
    """y = totals * scale + bias, of a row's panel."""
    outs, first = p[8], panel * PANEL
    width, out = min(PANEL, outs - first), shift(y, row * outs + first)
    scale, bias = f32_at(p[4]), f32_at(p[5])
    if p[5] == 0:
        for j in range(width):
            store(out, j, load(totals, j) * (row_scale * load(scale, first + j)))
    else:
        for j in range(width):
            value = load(totals, j) * (row_scale * load(scale, first + j))
            store(out, j, value + load(bias, first + j))


@jit
def multiply_i8(p, x, y):
    """y = x W^T + bias with bytes.

    p[2] `x` T [rows, in]; p[3] `weight` int8 panels of `padded` inputs; p[4] scale fp32 [out]; p[5] bias fp32 [out] or
    0; p[6] `y` T [rows, out]; p[7] rows, p[8] out, p[9] in, p[10] padded; p[11] panels per piece; p[12] scratch, p[13]
    bytes of it per thread: [sums | totals | scales | rows of int16].
    """
    rows, outs, size, padded, per_piece = p[7], p[8], p[9], p[10], p[11]
    mine = p[12] + p[13] * take(p, 1)
    sums, totals, scales = i32_at(mine), f32_at(mine + 4 * ROWS * PANEL), f32_at(mine + 8 * ROWS * PANEL)
    rounded = mine + 8 * ROWS * PANEL + 4 * rows
    round_rows(x, rows, size, padded, i16_at(rounded), scales)
    pairs, panels = padded // 2, (outs + PANEL - 1) // PANEL
    while True:
        start = take(p, 0) * per_piece
        if start >= panels:
            break
        end = min(start + per_piece, panels)
        for panel in range(start, end):
            ahead = PANEL * padded if panel + 1 < end else 0
            weight = i8_at(p[3] + PANEL * padded * panel)
            for row in range(0, rows, ROWS):
                count, line = min(ROWS, rows - row), row // ROWS % 2 * LINE
                some = i32_at(rounded + 2 * padded * row)
                panel_in_segments(some, pairs, weight, pairs, count, sums, totals, ahead + line)
                for r in range(count):
                    scale_and_add(p, y, row + r, panel, shift(totals, r * PANEL), load(scales, row + r))


@jit
def round_panels(p, weight):
    """Bytes with a scale per output from a plain matrix: the largest weight of an output becomes 127 or -127.

    p[2] `weight` T [out, in]; p[3] int8 panels; p[4] scale fp32 [out]; p[5] out, p[6] in, p[7] padded; p[8] panels per
    piece.
    """
    outs, size, padded, per_piece = p[5], p[6], p[7], p[8]
    scale = f32_at(p[4])
    panels = (outs + PANEL - 1) // PANEL
    while True:
        start = take(p, 0) * per_piece
        if start >= panels:
            break
        for panel in range(start, min(start + per_piece, panels)):
            target = i8_at(p[3] + PANEL * padded * panel)
            for i in range(PANEL * padded):
                target[i] = 0
            for j in range(min(PANEL, outs - panel * PANEL)):
                out = panel * PANEL + j
                source = shift(weight, out * size)
                largest = TINY
                for i in range(size):
                    largest = max(largest, abs(load(source, i)))
                factor = LIMIT / largest
                for i in range(size):
                    value = np.rint(load(source, i) * factor)
                    target[i // 2 * 2 * PANEL + 2 * j + i % 2] = np.int8(value)
                store(scale, out, largest / LIMIT)


def multiply_i8_bf16(p):
    multiply_i8(p, bf16_at(p[2]), bf16_at(p[6]))


def multiply_i8_f32(p):
    multiply_i8(p, f32_at(p[2]), f32_at(p[6]))


def round_panels_bf16(p):
    round_panels(p, bf16_at(p[2]))


def round_panels_f32(p):
    round_panels(p, f32_at(p[2]))
