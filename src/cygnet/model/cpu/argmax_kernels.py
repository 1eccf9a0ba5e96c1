"""The likeliest token: the place of the largest logit of every row, from logits or straight from a head in panels."""

import numpy as np

from cygnet.model.cpu.jit import bf16_at, f32_at, i32_at, i64_at, jit, load, order, shift, store, take
from cygnet.model.cpu.linear_kernels import LINE, panel_of_bf16
from cygnet.model.cpu.panel_layout import PANEL, ROWS

FIRST = -(1 << 31)


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


def best_bf16(p):
    best(p, bf16_at(p[2]))


def best_f32(p):
    best(p, f32_at(p[2]))


def best_of_panels_bf16(p):
    best_of_panels(p)
