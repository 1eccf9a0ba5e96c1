"""The likeliest token: from logits, or from weights in bytes, with the few that may win worked out exactly.

logit of output n     |  bytes . x  -  what rounding can amount to  ...  bytes . x  +  ...  |
may win               its upper end is above the largest lower end of all outputs
"""

import numpy as np

from cygnet.model.cpu.jit import bf16_at, f32_at, i32_at, i64_at, jit, load, order, shift, store, take
from cygnet.model.cpu.linear_kernels import LINE, panel_of_bf16, with_i8_panels
from cygnet.model.cpu.panel_layout import PANEL, ROWS

ZERO = np.float32(0.0)
HALF = np.float32(0.5)
FIRST = -(1 << 31)
LOWEST = np.float32(-3.0e38)
ROOM = np.float32(1.001)
"""For fp32's own rounding."""


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


@jit
def best_of_panels(p):
    """The first of the largest logits, rounded to bf16, of every piece of a head in panels; no logits are kept.

    p[2] `x` bf16 [rows, in]; p[3] bf16 panels; p[4] int64 [rows, pieces, 2] for (order of the logit, place); p[5] rows,
    p[6] out, p[7] in; p[8] panels per piece; p[9] scratch fp32 [threads, (ROWS + 1) * PANEL]. `out` is a multiple of
    PANEL.
    """
    rows, outs, size, per_piece = p[5], p[6], p[7], p[8]
    mine = p[9] + 4 * (ROWS + 1) * PANEL * take(p, 1)
    sums, cells, found = f32_at(mine), bf16_at(mine + 4 * ROWS * PANEL), i64_at(p[4])
    pairs, panels = size // 2, outs // PANEL
    pieces = (panels + per_piece - 1) // per_piece
    while True:
        piece = take(p, 0)
        if piece >= pieces:
            break
        end = min((piece + 1) * per_piece, panels)
        for row in range(rows):
            found[2 * (row * pieces + piece)] = FIRST
        for panel in range(piece * per_piece, end):
            ahead = 2 * PANEL * size if panel + 1 < end else 0
            weight = i32_at(p[3] + 2 * PANEL * size * panel)
            for row in range(0, rows, ROWS):
                count, line = min(ROWS, rows - row), row // ROWS % 4 * LINE
                panel_of_bf16(i32_at(p[2] + 2 * size * row), pairs, weight, pairs, count, sums, ahead + line)
                for r in range(count):
                    result = shift(found, 2 * ((row + r) * pieces + piece))
                    keep_best(shift(sums, r * PANEL), cells, panel * PANEL, result)


@jit
def keep_best(sums, cells, first, result):
    """result = (order, place) of the largest of `sums`, rounded to bf16 into `cells`, if it is larger."""
    largest = np.int32(FIRST)
    for j in range(PANEL):
        store(cells, j, load(sums, j))
    for j in range(PANEL):
        largest = max(largest, order(cells, j))
    if largest > result[0]:
        place = 0
        while order(cells, place) != largest:
            place += 1
        result[0], result[1] = np.int64(largest), first + place


@jit
def bound(p, upper, row, panel, totals, scales):
    """Logits from bytes, each with how far it may be off, and the largest ends of the panel.

    p[4] scale fp32 [out]; `upper` fp32 [rows, out], upper ends; p[6] `ends` fp32 [2, rows, panels], the largest lower
    and upper ends; p[14] largest sum of an output's bytes' sizes.
    """
    rows, outs, first = p[7], p[8], panel * PANEL
    panels, width = (outs + PANEL - 1) // PANEL, min(PANEL, outs - first)
    out, scale, ends = shift(upper, row * outs + first), f32_at(p[4]), f32_at(p[6])
    row_scale = load(scales, row)
    # Half a step of every weight, times x; half a step of every x, times the rounded weights.
    off = ROOM * HALF * (load(scales, rows + row) + row_scale * np.float32(p[14]))
    lowest, highest = LOWEST, LOWEST
    for j in range(width):
        value, error = load(totals, j) * row_scale, off * load(scale, first + j)
        value *= load(scale, first + j)
        store(out, j, value + error)
        lowest, highest = max(lowest, value - error), max(highest, value + error)
    store(ends, row * panels + panel, lowest)
    # A NaN must not be passed over: it makes the scale a NaN, and so all ends of its row.
    store(ends, (rows + row) * panels + panel, highest + row_scale * ZERO)


screen = with_i8_panels(bound)


@jit
def product(x, weight, start, pair_stride, size):
    """x[0:size] . an output whose inputs stand in pairs, `pair_stride` elements apart, from weight[start] on."""
    total = ZERO
    for pair in range(size // 2):
        at = start + pair * pair_stride
        total += load(x, 2 * pair) * load(weight, at) + load(x, 2 * pair + 1) * load(weight, at + 1)
    if size % 2:
        total += load(x, size - 1) * load(weight, start + (size // 2) * pair_stride)
    return total


@jit
def settle(p, x, weight, cell):
    """Of the outputs whose upper end reaches a row's threshold, the likeliest by exact logits, rounded to T.

    p[2] `x` T [rows, in]; p[3] `weight` T, plain [out, in] or panels; p[4] `upper` fp32 [rows, out]; p[5] thresholds
    fp32 [rows]; p[6] int64 [rows, parts, 2] for (order of the logit, place); p[7] rows, p[8] out, p[9] in, p[10] parts,
    p[11] panels of a part; p[12] whether in panels; p[13] scratch of a T per thread, 64 bytes apart; p[14] largest
    upper ends fp32 [rows, panels]. A part without a candidate says (FIRST, its first place). A NaN is a candidate, and
    largest.
    """
    rows, outs, size, parts, length = p[7], p[8], p[9], p[10], p[11]
    panels = (outs + PANEL - 1) // PANEL
    while True:
        piece = take(p, 0)
        if piece >= rows * parts:
            break
        row, begin = piece // parts, piece % parts * length
        upper, threshold = shift(f32_at(p[4]), row * outs), load(f32_at(p[5]), row)
        largest, place = np.int64(FIRST), begin * PANEL
        for panel in range(begin, min(begin + length, panels)):
            if load(f32_at(p[14]), row * panels + panel) < threshold:
                continue
            for out in range(panel * PANEL, min((panel + 1) * PANEL, outs)):
                if load(upper, out) < threshold:
                    continue
                start, stride = out * size, 2
                if p[12] != 0:
                    start, stride = panel * PANEL * size + out % PANEL * 2, 2 * PANEL
                store(cell, 0, product(shift(x, row * size), weight, start, stride, size))
                value = np.int64(order(cell, 0))
                if value > largest:
                    largest, place = value, out
        result = shift(i64_at(p[6]), 2 * piece)
        result[0] = largest
        result[1] = place


def best_bf16(p):
    best(p, bf16_at(p[2]))


def best_f32(p):
    best(p, f32_at(p[2]))


def best_of_panels_bf16(p):
    best_of_panels(p)


def screen_bf16(p):
    screen(p, bf16_at(p[2]), f32_at(p[5]))


def screen_f32(p):
    screen(p, f32_at(p[2]), f32_at(p[5]))


def settle_bf16(p):
    settle(p, bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[13] + 64 * take(p, 1)))


def settle_f32(p):
    settle(p, f32_at(p[2]), f32_at(p[3]), f32_at(p[13] + 64 * take(p, 1)))
