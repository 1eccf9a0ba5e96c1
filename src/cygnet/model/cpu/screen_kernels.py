"""The likeliest token out of a head in bytes, with the few outputs that may win worked out exactly.

    logit of output n     |  q . y  -  what rounding can amount to  ...  q . y  +  ...  |
    may win               its upper end reaches the largest lower end of all outputs

q and y are what weights w and activations x are rounded to, and |w . x - q . y| = |(w - q) . x + q . (x - y)|, at most
|w - q| |x| + |q| |x - y| with Euclidean norms (and at most half a step of w times the sum of sizes of x, for the first
part). All those norms are known.

A step of y is chosen by row so that all but a few activations fit a byte: a model has some that are ten times the
others. Those have a second byte, and only the words (four inputs) with such are gone through twice. A word of weights
is four bytes without a sign, 128 more than the weight. Where bytes are widened before they are multiplied (AVX2), y is
in int16, and there are no second bytes.
"""

import numpy as np

from cygnet.model.cpu.argmax_kernels import FIRST
from cygnet.model.cpu.jit import bf16_at, f32_at, i8_at, i16_at, i32_at, i64_at, jit, load, order, shift, store, take
from cygnet.model.cpu.linear_kernels import LIMIT, LINE, TINY
from cygnet.model.cpu.panel_layout import PANEL, ROWS
from cygnet.model.cpu.vector import SHORTS, bound_panel, u8_listed, u8_panel

ZERO = np.float32(0.0)
HALF = np.float32(0.5)
ROOM = np.float32(1.001)
"""For the rounding of norms."""
FINE = np.float32(2.0**-20)
"""For fp32's rounding of a product of q and y and of q itself, as a part of |q| |x|."""
BIG = 16
"""Activations of a row that may need a second byte, at most (unless the largest is more than 250 times the others)."""
SMALLER = np.float32(0.75)
FURTHEST = np.float32(1 / 250)
"""Of the largest activation: the least that must still fit one byte."""
BIAS = 128
WORD = 8 if SHORTS else 4
"""Bytes of four activations."""
MOST = (2**31 - 1) // 255
"""The largest sum of sizes of activations in int16 whose products with bytes fit 32 bits."""

_u8_1, _u8_2, _u8_3, _u8_4 = u8_panel(1), u8_panel(2), u8_panel(3), u8_panel(4)
_listed_1, _listed_2, _listed_3, _listed_4 = u8_listed(1), u8_listed(2), u8_listed(3), u8_listed(4)


@jit
def panel_of_u8(x, stride, weight, words, rows, sums, ahead):
    """sums int32 [rows, PANEL] of up to ROWS rows of words `x`."""
    if rows == 1:
        _u8_1(x, stride, weight, words, sums, ahead)
    elif rows == 2:
        _u8_2(x, stride, weight, words, sums, ahead)
    elif rows == 3:
        _u8_3(x, stride, weight, words, sums, ahead)
    else:
        _u8_4(x, stride, weight, words, sums, ahead)


@jit
def listed_of_u8(x, stride, weight, words, listed, rows, sums):
    """The same of the words of `weight` that are listed."""
    if rows == 1:
        _listed_1(x, stride, weight, words, listed, sums)
    elif rows == 2:
        _listed_2(x, stride, weight, words, listed, sums)
    elif rows == 3:
        _listed_3(x, stride, weight, words, listed, sums)
    else:
        _listed_4(x, stride, weight, words, listed, sums)


@jit
def round_head(p, weight):
    """Bytes with a scale per output: the largest weight of an output becomes 127 or -127.

    p[2] `weight` T [out, in]; p[3] panels of words, in the last of which the last output is repeated; p[4] fp32 [3,
    panels * PANEL]: scale, |w - q|, |q|; p[5] out, p[6] in, p[7] words of an output; p[8] panels per piece.
    """
    outs, size, words, per_piece = p[5], p[6], p[7], p[8]
    panels = (outs + PANEL - 1) // PANEL
    scale = f32_at(p[4])
    off, norm = shift(scale, panels * PANEL), shift(scale, 2 * panels * PANEL)
    while True:
        start = take(p, 0) * per_piece
        if start >= panels:
            break
        for panel in range(start, min(start + per_piece, panels)):
            target = i8_at(p[3] + 4 * PANEL * words * panel)
            for i in range(4 * PANEL * words):
                target[i] = np.int8(-BIAS)
            for j in range(PANEL):
                out = panel * PANEL + j
                source = shift(weight, min(out, outs - 1) * size)
                largest = TINY
                for i in range(size):
                    largest = max(largest, abs(load(source, i)))
                factor, step, lost, total = LIMIT / largest, largest / LIMIT, ZERO, ZERO
                for i in range(size):  # norms in steps: squares of very large or small numbers are none
                    value = load(source, i) * factor
                    rounded = np.rint(value)
                    target[i // 4 * 4 * PANEL + 4 * j + i % 4] = np.int8(np.int32(rounded) - BIAS)
                    lost += (rounded - value) * (rounded - value)
                    total += rounded * rounded
                store(scale, out, step)
                store(off, out, ROOM * np.sqrt(lost) * step)
                store(norm, out, ROOM * np.sqrt(total) * step)


@jit
def step_of(x, size, largest):
    """A step for the row: at most BIG of x are above 127 of it."""
    limit, fewest = largest, largest * FURTHEST
    while limit * SMALLER > fewest:
        count, smaller = 0, limit * SMALLER
        for i in range(size):
            count += 1 if abs(load(x, i)) > smaller else 0
        if count > BIG:
            break
        limit = smaller
    return limit / LIMIT


@jit
def round_row(x, size, padded, low, high, figures, stride):
    """A row of `x` in steps: 256 * high + low. Returns 128 times the sums of `low` and of `high`.

    `figures` fp32, `stride` apart: the step; then, for the bound, half the sum of sizes of x, |x|, and |x - y| with
    what fp32 adds. A row with a NaN or infinity is all zeros with the step NaN.
    """
    largest, strange, total = TINY, ZERO, ZERO
    for i in range(size):
        value = load(x, i)
        largest = max(largest, abs(value))
        total += abs(value)
        strange += value * ZERO
    low_sum, high_sum, square, lost = 0, 0, ZERO, ZERO
    step = strange if strange != ZERO else step_of(x, size, largest)
    factor = ZERO if strange != ZERO else np.float32(1.0) / step
    for i in range(size):
        value = ZERO if strange != ZERO else load(x, i) * factor
        rounded = np.rint(value)
        whole = np.int32(rounded)
        upper = (whole + BIAS) >> 8
        lower = whole - (upper << 8)
        low[i], high[i] = np.int8(lower), np.int8(upper)
        low_sum += lower
        high_sum += upper
        square += value * value
        lost += (rounded - value) * (rounded - value)
    for i in range(size, padded):
        low[i], high[i] = np.int8(0), np.int8(0)
    store(figures, 0, step)
    store(figures, stride, ROOM * HALF * total)
    store(figures, 2 * stride, ROOM * np.sqrt(square) * step)
    store(figures, 3 * stride, (ROOM * np.sqrt(lost) + FINE * np.sqrt(square)) * step)
    return np.int32(BIAS * low_sum), np.int32(BIAS * high_sum)


@jit
def round_row_to_shorts(x, size, padded, shorts, figures, stride):
    """As `round_row`, in int16 as fine as 32-bit sums allow; bytes 0, 2, 1, 3 of a word stand in this order. Returns
    128 times their sum."""
    largest, strange, total = TINY, ZERO, ZERO
    for i in range(size):
        value = load(x, i)
        largest = max(largest, abs(value))
        total += abs(value)
        strange += value * ZERO
    most = np.float32(min(32767, MOST // padded))
    step = strange if strange != ZERO else largest / most
    factor = ZERO if strange != ZERO else most / largest
    whole_sum, square, lost = 0, ZERO, ZERO
    for i in range(padded):
        value = ZERO if strange != ZERO or i >= size else load(x, i) * factor
        rounded = np.rint(value)
        whole = np.int32(rounded)
        shorts[i // 4 * 4 + i % 2 * 2 + i % 4 // 2] = np.int16(whole)
        whole_sum += whole
        square += value * value
        lost += (rounded - value) * (rounded - value)
    store(figures, 0, step)
    store(figures, stride, ROOM * HALF * total)
    store(figures, 2 * stride, ROOM * np.sqrt(square) * step)
    store(figures, 3 * stride, (ROOM * np.sqrt(lost) + FINE * np.sqrt(square)) * step)
    return np.int32(BIAS * whole_sum)


@jit
def gather_high(high, rows, words, listed):
    """Lists the words of `high` int32 [rows, words] with anything in them, and moves them to the rows' beginnings."""
    count = 0
    for word in range(words):
        found = 0
        for r in range(rows):
            found |= high[r * words + word]
        if found != 0:
            for r in range(rows):
                high[r * words + count] = high[r * words + word]
            listed[count] = word
            count += 1
    return count


@jit
def screen(p, x):
    """Upper ends of all logits, and the largest ends of every panel.

    p[2] `x` T [rows, in]; p[3] panels of words; p[4] fp32 [3, panels * PANEL] as `round_head` fills it; p[5] `upper`
    fp32 [rows, panels * PANEL]; p[6] `ends` fp32 [2, rows, panels], the largest lower and upper ends; p[7] rows, p[8]
    panels, p[9] in, p[10] words of an output; p[11] panels per piece; p[12] scratch, p[13] bytes of it per thread:
    [sums, those of high bytes int32 [ROWS, PANEL] | counts int64 [groups], lists int64 [groups, words] | biases int32
    [rows, 2] | figures fp32 [4, rows] | low, high bytes [rows, words, 4], or int16 [rows, words, 4]], where a group is
    ROWS rows.
    """
    rows, panels, size, words, per_piece = p[7], p[8], p[9], p[10], p[11]
    mine, groups = p[12] + p[13] * take(p, 1), (rows + ROWS - 1) // ROWS
    sums, high_sums, counts = i32_at(mine), i32_at(mine + 4 * ROWS * PANEL), i64_at(mine + 8 * ROWS * PANEL)
    lists, biases_at = shift(counts, groups), mine + 8 * (ROWS * PANEL + groups * (1 + words))
    biases, of_rows, low = i32_at(biases_at), f32_at(biases_at + 8 * rows), biases_at + 24 * rows
    high, of_outputs, upper, ends = low + 4 * rows * words, f32_at(p[4]), f32_at(p[5]), f32_at(p[6])
    for row in range(rows):
        one, at, figures = shift(x, row * size), WORD * row * words, shift(of_rows, row)
        if SHORTS:
            biases[2 * row] = round_row_to_shorts(one, size, 4 * words, i16_at(low + at), figures, rows)
            biases[2 * row + 1] = 0
        else:
            biases[2 * row], biases[2 * row + 1] = round_row(
                one, size, 4 * words, i8_at(low + at), i8_at(high + at), figures, rows
            )
    for group in range(0 if SHORTS else groups):
        first = group * ROWS
        some, count = i32_at(high + 4 * first * words), min(ROWS, rows - first)
        counts[group] = gather_high(some, count, words, shift(lists, group * words))
    for i in range(ROWS * PANEL):
        high_sums[i] = 0
    while True:
        start = take(p, 0) * per_piece
        if start >= panels:
            break
        end = min(start + per_piece, panels)
        for panel in range(start, end):
            ahead = 4 * PANEL * words if panel + 1 < end else 0
            weight = i32_at(p[3] + 4 * PANEL * words * panel)
            for group in range(groups):
                first, listed = group * ROWS, shift(lists, group * words)
                count, line, at = min(ROWS, rows - first), group % 2 * LINE, WORD * first * words
                panel_of_u8(i32_at(low + at), words, weight, words, count, sums, ahead + line)
                if not SHORTS:
                    listed_of_u8(i32_at(high + at), words, weight, counts[group], listed, count, high_sums)
                for row in range(first, first + count):
                    at, end_at = (row - first) * PANEL, row * panels + panel
                    bound_panel(
                        shift(sums, at),
                        shift(high_sums, at),
                        shift(biases, 2 * row),
                        shift(of_outputs, panel * PANEL),
                        panels * PANEL,
                        shift(of_rows, row),
                        rows,
                        shift(upper, end_at * PANEL),
                        shift(ends, end_at),
                        shift(ends, rows * panels + end_at),
                    )
                    # A NaN must not be passed over: it makes the step a NaN, and so the upper ends of its row.
                    store(ends, rows * panels + end_at, load(ends, rows * panels + end_at) + load(of_rows, row) * ZERO)


@jit
def product(x, weight, start, pair_stride, size):
    """x[0:size] . an output whose inputs stand in pairs, `pair_stride` elements apart, from weight[start] on."""
    total = ZERO
    if pair_stride == 2:
        for i in range(size):
            total += load(x, i) * load(weight, start + i)
    else:
        for pair in range(size // 2):
            at = start + pair * pair_stride
            total += load(x, 2 * pair) * load(weight, at) + load(x, 2 * pair + 1) * load(weight, at + 1)
    return total


@jit
def settle(p, x, weight, cell):
    """Of the outputs whose upper end reaches a row's threshold, the likeliest by exact logits, rounded to T.

    p[2] `x` T [rows, in]; p[3] `weight` T or bf16, plain [out, in] or panels; p[4] `upper` fp32 [rows, panels * PANEL];
    p[5] thresholds fp32 [rows]; p[6] int64 [rows, parts, 2] for (order of the logit, place); p[7] rows, p[8] out, p[9]
    in, p[10] parts, p[11] panels of a part; p[12] whether in panels; p[13] scratch of a T per thread, 64 bytes apart;
    p[14] largest upper ends fp32 [rows, panels]. A part without a candidate says (FIRST, its first place). A NaN is a
    candidate, and largest.
    """
    rows, outs, size, parts, length = p[7], p[8], p[9], p[10], p[11]
    panels = (outs + PANEL - 1) // PANEL
    while True:
        piece = take(p, 0)
        if piece >= rows * parts:
            break
        row, begin = piece // parts, piece % parts * length
        upper, threshold = shift(f32_at(p[4]), row * panels * PANEL), load(f32_at(p[5]), row)
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


def round_head_bf16(p):
    round_head(p, bf16_at(p[2]))


def round_head_f32(p):
    round_head(p, f32_at(p[2]))


def screen_bf16(p):
    screen(p, bf16_at(p[2]))


def screen_f32(p):
    screen(p, f32_at(p[2]))


def settle_bf16(p):
    settle(p, bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[13] + 64 * take(p, 1)))


def settle_f32(p):
    settle(p, f32_at(p[2]), f32_at(p[3]), f32_at(p[13] + 64 * take(p, 1)))


def settle_widened_f32(p):
    """With a weight in bf16."""
    settle(p, f32_at(p[2]), bf16_at(p[3]), f32_at(p[13] + 64 * take(p, 1)))
