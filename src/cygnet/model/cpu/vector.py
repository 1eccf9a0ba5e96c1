"""Sixteen lanes at a time, where the compiler finds no such instruction: pairs of bf16 or int16, or fours of bytes,
multiplied and added.

Weights lie in panels of 64 outputs, as oneDNN packs them for bf16:

    panel 0: inputs 0, 1 of outputs 0 ... 63 | inputs 2, 3 of outputs 0 ... 63 | ...     panel 1: outputs 64 ... 127

so that one load of 16 words of 32 bits holds two inputs of 16 outputs, and a pair of activations is broadcast to all
lanes. Bytes that meet bytes lie alike, four inputs to a word. On x86 with AVX-512 a step is one `vdpbf16ps`, `vpdpwssd`
or `vpdpbusd`; with AVX2, integers take two `vpmaddwd` of half a vector; elsewhere it is spelled out, and the compiler
makes of it what the machine has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from cygnet.model.cpu.panel_layout import PANEL

LANES = 16

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, LANES), ir.VectorType(_FLOAT, LANES)
_VECTORS = PANEL // LANES

llvmlite.binding.initialize_native_asmparser()  # what `_instruction` writes is read by it


@dataclass(frozen=True)
class Dot:
    """A step of a sum of products: (builder, sums, words of weights, words of activations ...) -> sums."""

    add: Callable[..., Any]
    words: int = 1
    """Words of activations, one after the other, that meet one of weights."""

    def __call__(self, builder: Any, sums: Any, weights: Any, *words: Any) -> Any:
        return self.add(builder, sums, weights, *words)


def _has(*features: str) -> bool:
    """Whether numba compiles for a CPU with all of them: its settings may ask for less than the machine has."""
    found = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return all(f"+{feature}" in found for feature in features)


def _instruction(text: str, kind: ir.VectorType) -> Dot:
    shape = ir.FunctionType(kind, [kind, _WORDS, _WORDS])

    def dot(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
        code = ir.InlineAsm(shape, f"{text} $3, $2, $0", "=v,0,v,v")
        return builder.call(code, [sums, weights, pair])

    return Dot(dot)


def splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    """All lanes `value`."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    zeros = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), zeros)


def _number(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _halves(builder: Any, words: Any) -> tuple[Any, Any]:
    """Both bf16 of each word, in fp32."""
    low, high = builder.shl(words, _number(16)), builder.and_(words, _number(0xFFFF0000))
    return builder.bitcast(low, _FLOATS), builder.bitcast(high, _FLOATS)


def _dot_bf16_plain(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
    """Both halves widened to fp32, two fused multiply-adds."""
    for one, other in zip(_halves(builder, weights), _halves(builder, pair), strict=True):
        sums = builder.fadd(sums, builder.fmul(one, other, flags=("contract",)), flags=("contract",))
    return sums


def _dot_i16_plain(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
    """Both halves widened to 32 bits, two products."""
    for part in (
        lambda words: builder.ashr(builder.shl(words, _number(16)), _number(16)),
        lambda words: builder.ashr(words, _number(16)),
    ):
        sums = builder.add(sums, builder.mul(part(weights), part(pair)))
    return sums


def _dot_u8_plain(builder: Any, sums: Any, weights: Any, quad: Any) -> Any:
    """Bytes of weights, without a sign, and of activations, with one, widened to 32 bits: four products."""
    for byte in range(4):
        weight = builder.and_(builder.lshr(weights, _number(8 * byte)), _number(0xFF))
        signed = builder.ashr(builder.shl(quad, _number(24 - 8 * byte)), _number(24))
        sums = builder.add(sums, builder.mul(weight, signed))
    return sums


def _dot_i16_halves(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
    """`vpmaddwd` of eight lanes, twice."""
    half = ir.VectorType(_WORD, LANES // 2)
    short = ir.VectorType(ir.IntType(16), LANES)
    multiply = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), ir.FunctionType(half, [short, short]))

    def part(words: Any, first: int) -> Any:
        lanes = ir.Constant(ir.VectorType(_WORD, LANES // 2), list(range(first, first + LANES // 2)))
        return builder.bitcast(builder.shuffle_vector(words, words, lanes), short)

    low, high = (builder.call(multiply, [part(weights, n), part(pair, n)]) for n in (0, LANES // 2))
    return builder.add(sums, builder.shuffle_vector(low, high, ir.Constant(_WORDS, list(range(LANES)))))


def _dot_u8_split(builder: Any, sums: Any, weights: Any, even: Any, odd: Any) -> Any:
    """Bytes 0 and 2 of the weights, widened to int16, by the pair `even`, and 1 and 3 by `odd`."""
    low = builder.and_(weights, _number(0x00FF00FF))
    high = builder.and_(builder.lshr(weights, _number(8)), _number(0x00FF00FF))
    return _dot_i16_halves(builder, _dot_i16_halves(builder, sums, low, even), high, odd)


dot_bf16_plain, dot_i16_plain, dot_u8_plain = Dot(_dot_bf16_plain), Dot(_dot_i16_plain), Dot(_dot_u8_plain)
dot_bf16, dot_i16, dot_u8 = dot_bf16_plain, dot_i16_plain, dot_u8_plain
if _has("avx2"):
    dot_i16, dot_u8 = Dot(_dot_i16_halves), Dot(_dot_u8_split, words=2)
if _has("avx512f", "avx512vnni"):
    dot_i16, dot_u8 = _instruction("vpdpwssd", _WORDS), _instruction("vpdpbusd", _WORDS)
if _has("avx512f", "avx512bf16"):
    dot_bf16 = _instruction("vdpbf16ps", _FLOATS)


def _vectors_at_once(rows: int) -> int:
    """Vectors of a panel that go through its inputs together: their sums, of all rows, have to fit the registers."""
    return _VECTORS if _has("avx512f") else max(1, _VECTORS // rows)


def counted_loop(builder: Any, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
    """for i in range(count): carried = body(i, carried); what is carried at the end."""
    before = builder.basic_block
    again, done = builder.append_basic_block("again"), builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(_LONG, 0)), again, done)
    builder.position_at_end(again)
    index = builder.phi(_LONG)
    inside = [builder.phi(value.type) for value in carried]
    results = body(index, inside)
    last, following = builder.basic_block, builder.add(index, ir.Constant(_LONG, 1))
    for phi, first, later in zip(
        (index, *inside), (ir.Constant(_LONG, 0), *carried), (following, *results), strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(later, last)
    builder.cbranch(builder.icmp_signed("<", following, count), again, done)
    builder.position_at_end(done)
    after = [builder.phi(value.type) for value in carried]
    for phi, first, later in zip(after, carried, results, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, last)
    return after


def vector_at(builder: Any, pointer: Any, index: Any, kind: ir.VectorType) -> Any:
    """Pointer to the vector that begins at pointer[index]."""
    return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())


def _weight_words(builder: Any, weight: Any, index: Any, vector: int, kind: ir.VectorType = _WORDS) -> Any:
    """Words `index` of 16 outputs: pairs of bf16, four bytes, or an fp32; `weight` points at what `kind` holds."""
    start = builder.add(builder.mul(index, ir.Constant(_LONG, PANEL)), ir.Constant(_LONG, vector * LANES))
    return builder.load(vector_at(builder, weight, start, kind), align=4)


def _weights_i8(builder: Any, weight: Any, index: Any, vector: int) -> Any:
    """The same of bytes, widened to int16."""
    start = builder.add(builder.mul(index, ir.Constant(_LONG, 2 * PANEL)), ir.Constant(_LONG, 2 * vector * LANES))
    narrow = builder.load(vector_at(builder, weight, start, ir.VectorType(ir.IntType(8), 2 * LANES)), align=1)
    return builder.bitcast(builder.sext(narrow, ir.VectorType(ir.IntType(16), 2 * LANES)), _WORDS)


def ask_for(builder: Any, address: Any, offset: Any) -> None:
    """Prefetch into the second-level cache; no fault, whatever the address."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    options = [ir.Constant(_WORD, value) for value in (0, 2, 1)]
    builder.call(function, [builder.gep(address, [offset]), *options])


def add_rows(
    builder: Any, dot: Dot, x: Any, stride: Any, index: Any, weights: Sequence[Any], totals: Sequence[Any]
) -> list[Any]:
    """totals[row, vector] + word x[row * stride + index] . weights[vector]; `stride` and `index` in steps of `dot`"""
    results = []
    for row in range(len(totals) // len(weights)):
        place = builder.add(builder.mul(stride, ir.Constant(_LONG, row)), index)
        first = builder.mul(place, ir.Constant(_LONG, dot.words))
        places = [builder.add(first, ir.Constant(_LONG, word)) for word in range(dot.words)]
        words = [splat(builder, builder.load(builder.gep(x, [at])), _WORDS) for at in places]
        for vector, weight in enumerate(weights):
            results.append(dot(builder, totals[row * len(weights) + vector], weight, *words))
    return results


Step = Callable[[Any, range, list[Any]], list[Any]]
"""(index, vectors, totals) -> totals [rows, vectors] with one more step of these vectors of the panel"""


def _sum_panel(builder: Any, rows: int, count: Any, sums: Any, kind: ir.VectorType, step: Step) -> None:
    """sums [rows, PANEL] = `count` steps, as many vectors at a time as the registers hold."""
    at_once = _vectors_at_once(rows)
    for first in range(0, _VECTORS, at_once):
        vectors = range(first, min(first + at_once, _VECTORS))
        zeros = [ir.Constant(kind, [0] * LANES)] * (rows * len(vectors))

        def some(index: Any, totals: list[Any], vectors: range = vectors) -> list[Any]:
            return step(index, vectors, totals)

        totals = counted_loop(builder, count, zeros, some)
        places = [row * PANEL + vector * LANES for row in range(rows) for vector in vectors]
        for place, total in zip(places, totals, strict=True):
            builder.store(total, vector_at(builder, sums, ir.Constant(_LONG, place), kind), align=4)


def _asked(vectors: range, step_bytes: int, lines: int) -> list[int]:
    """Where in a step's bytes cache lines are asked for while `vectors` go through it: `lines` of them evenly, or one
    in each of several goes."""
    if len(vectors) == _VECTORS:
        return [line * step_bytes // lines for line in range(lines)]
    return [vectors.start * step_bytes // _VECTORS]


def panel_product(
    rows: int, dot: Dot, load_weights: Callable[[Any, Any, Any, int], Any], lane: Any, step_bytes: int, lines: int = 1
) -> Any:
    """An intrinsic (x, stride, weight, words, sums, ahead): sums[r, j] = x[r] . output j of the panel, for `rows` rows.

    `x` points at words of 32 bits, `stride` of them from row to row, or as many times `dot.words`; `sums` [rows,
    PANEL]. With each step a cache line is asked for that lies `ahead` bytes behind what the step reads; `lines` of
    them, evenly over what it reads, or one in each go where the vectors take several.
    """
    kind = ir.VectorType(lane, LANES)

    @intrinsic
    def product(typing_context: Any, x: Any, stride: Any, weight: Any, pairs: Any, sums: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, weight, pairs, sums, ahead = args
            later = builder.gep(builder.bitcast(weight, ir.IntType(8).as_pointer()), [ahead])

            def step(index: Any, vectors: range, totals: list[Any]) -> list[Any]:
                weights = [load_weights(builder, weight, index, vector) for vector in vectors]
                for start in _asked(vectors, step_bytes, lines):
                    place = builder.mul(index, ir.Constant(_LONG, step_bytes))
                    ask_for(builder, later, builder.add(place, ir.Constant(_LONG, start)))
                return add_rows(builder, dot, x, stride, index, weights, totals)

            _sum_panel(builder, rows, pairs, sums, kind, step)
            return context.get_dummy_value()

        return types.void(x, stride, weight, pairs, sums, types.int64), generate

    return product


def bf16_panel(rows: int, dot: Dot = dot_bf16) -> Any:
    """`panel_product` of bf16 and bf16; `weight` int32*, `sums` float32*."""
    return panel_product(rows, dot, _weight_words, _FLOAT, 4 * PANEL)


Widen = Callable[[Any, Any, Any, int], Sequence[Any]]
"""(builder, weight, index, vector) -> of one step's inputs, each, 16 weights in fp32"""


def _widened(builder: Any, weight: Any, index: Any, vector: int) -> Sequence[Any]:
    return _halves(builder, _weight_words(builder, weight, index, vector))


def _floats(builder: Any, weight: Any, index: Any, vector: int) -> Sequence[Any]:
    return (_weight_words(builder, weight, index, vector, _FLOATS),)


def _float_product(rows: int, inputs: int, widen: Widen, fetch: bool, at_once: int) -> Any:
    """An intrinsic (x, stride, weight, steps, sums, ahead): sums[r, j] += x[r] . output j of the panel, in fp32.

    `x` float32*, `stride` of them from row to row, `inputs` of them a step; `sums` float32* [rows, PANEL]. With
    `fetch`, a cache line is asked for with each step, `ahead` bytes behind what it reads. However many rows there are,
    a sum is added up in the same order.
    """
    fused = ("contract",)

    @intrinsic
    def product(typing_context: Any, x: Any, stride: Any, weight: Any, steps: Any, sums: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, weight, steps, sums, ahead = args
            later = builder.gep(builder.bitcast(weight, ir.IntType(8).as_pointer()), [ahead])

            def through(vectors: range) -> None:
                def step(index: Any, totals: list[Any]) -> list[Any]:
                    for start in _asked(vectors, 4 * PANEL, 1) if fetch else ():
                        place = builder.mul(index, ir.Constant(_LONG, 4 * PANEL))
                        ask_for(builder, later, builder.add(place, ir.Constant(_LONG, start)))
                    weights = [widen(builder, weight, index, vector) for vector in vectors]
                    first, results = builder.mul(index, ir.Constant(_LONG, inputs)), list(totals)
                    for row in range(rows):
                        at = builder.add(builder.mul(stride, ir.Constant(_LONG, row)), first)
                        for i in range(inputs):
                            place = builder.gep(x, [builder.add(at, ir.Constant(_LONG, i))])
                            number = splat(builder, builder.load(place), _FLOATS)
                            for n, of_vector in enumerate(weights, row * len(vectors)):
                                added = builder.fmul(of_vector[i], number, flags=fused)
                                results[n] = builder.fadd(results[n], added, flags=fused)
                    return results

                starts = [row * PANEL + vector * LANES for row in range(rows) for vector in vectors]
                places = [vector_at(builder, sums, ir.Constant(_LONG, start), _FLOATS) for start in starts]
                totals = counted_loop(builder, steps, [builder.load(place, align=4) for place in places], step)
                for place, total in zip(places, totals, strict=True):
                    builder.store(total, place, align=4)

            for first in range(0, _VECTORS, at_once):
                through(range(first, min(first + at_once, _VECTORS)))
            return context.get_dummy_value()

        return types.void(x, stride, weight, steps, sums, types.int64), generate

    return product


def widened_panel(rows: int, at_once: int = 0) -> Any:
    """`_float_product` of fp32 and bf16 in pairs, widened on the way; `weight` int32*, steps of two inputs."""
    return _float_product(rows, 2, _widened, True, at_once or _vectors_at_once(rows))


def float_panel(rows: int, at_once: int = 0) -> Any:
    """`_float_product` of fp32 and a panel in fp32, [in, PANEL]; `weight` float32*, steps of one input."""
    return _float_product(rows, 1, _floats, False, at_once or _vectors_at_once(rows))


def i8_panel(rows: int, dot: Dot = dot_i16) -> Any:
    """`panel_product` of int16 and int8; `weight` int8*, `sums` int32*."""
    return panel_product(rows, dot, _weights_i8, _WORD, 2 * PANEL)


def u8_panel(rows: int, dot: Dot = dot_u8) -> Any:
    """`panel_product` of fours of int8 (x; int16 where `dot` takes two words) and uint8; `weight`, `sums` int32*."""
    return panel_product(rows, dot, _weight_words, _WORD, 4 * PANEL, lines=2)


SHORTS = dot_u8.words == 2
"""Whether `dot_u8` takes four activations as int16, in two words: those of bytes 0 and 2, and of 1 and 3."""


def u8_listed(rows: int, dot: Dot = dot_u8) -> Any:
    """An intrinsic (x, stride, weight, words, listed, sums): as `u8_panel`, but word n of a row of `x` meets word
    listed[n] (int64*) of the outputs, and nothing is asked for."""

    @intrinsic
    def product(typing_context: Any, x: Any, stride: Any, weight: Any, words: Any, listed: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, weight, words, listed, sums = args

            def step(index: Any, vectors: range, totals: list[Any]) -> list[Any]:
                found = builder.load(builder.gep(listed, [index]))
                weights = [_weight_words(builder, weight, found, vector) for vector in vectors]
                return add_rows(builder, dot, x, stride, index, weights, totals)

            _sum_panel(builder, rows, words, sums, _WORDS, step)
            return context.get_dummy_value()

        return types.void(x, stride, weight, words, listed, sums), generate

    return product


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _largest_lane(builder: Any, value: Any) -> Any:
    """The largest of a vector's lanes."""
    for width in (8, 4, 2, 1):
        order = ir.Constant(_WORDS, [(lane + width) % LANES for lane in range(LANES)])
        value = _larger(builder, value, builder.shuffle_vector(value, value, order))
    return builder.extract_element(value, ir.Constant(_WORD, 0))


@intrinsic
def bound_panel(
    typing_context: Any, sums: Any, high_sums: Any, biases: Any, figures: Any, stride: Any, of_row: Any, apart: Any,
    upper: Any, lower_end: Any, upper_end: Any,
) -> Any:  # fmt: skip
    """A row's logits of a panel, each with how far it may be off: their upper ends, and the largest of both ends.

    value = (sums - biases[0] + 256 * (high_sums - biases[1])) * scale * step
    error = min(scale * size, off * length) + norm * lost

    `sums`, `high_sums` int32 [PANEL], `biases` int32 [2]; `figures` fp32, `stride` apart: scale, off, norm [PANEL];
    `of_row` fp32, `apart` apart: step, size, length, lost. To `upper` fp32 [PANEL]; `lower_end`, `upper_end` fp32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, high_sums, biases, figures, stride, of_row, apart, upper, lower_end, upper_end = args
        fused = ("contract",)

        def number(pointer: Any, index: Any, kind: Any) -> Any:
            return splat(builder, builder.load(builder.gep(pointer, [index])), kind)

        def whole(pointer: Any, vector: int, bias: Any) -> Any:
            place = vector_at(builder, pointer, ir.Constant(_LONG, vector * LANES), _WORDS)
            return builder.sitofp(builder.sub(builder.load(place, align=4), bias), _FLOATS)

        low_bias, high_bias = (number(biases, ir.Constant(_LONG, i), _WORDS) for i in range(2))
        step, size, length, lost = (
            number(of_row, builder.mul(apart, ir.Constant(_LONG, i)), _FLOATS) for i in range(4)
        )
        lowest, highest = [], []
        for vector in range(_VECTORS):
            at = ir.Constant(_LONG, vector * LANES)
            scale, off, norm = (
                builder.load(
                    vector_at(builder, figures, builder.add(builder.mul(stride, ir.Constant(_LONG, i)), at), _FLOATS),
                    align=4,
                )
                for i in range(3)
            )
            high = builder.fmul(whole(high_sums, vector, high_bias), ir.Constant(_FLOATS, [256.0] * LANES), flags=fused)
            value = builder.fadd(whole(sums, vector, low_bias), high, flags=fused)
            value = builder.fmul(value, builder.fmul(scale, step))
            by_size, by_length = builder.fmul(scale, size), builder.fmul(off, length)
            error = builder.select(builder.fcmp_ordered("<", by_length, by_size), by_length, by_size)
            error = builder.fadd(error, builder.fmul(norm, lost, flags=fused), flags=fused)
            ends = builder.fsub(value, error), builder.fadd(value, error)
            builder.store(ends[1], vector_at(builder, upper, at, _FLOATS), align=4)
            lowest.append(ends[0])
            highest.append(ends[1])
        for vectors, end in ((lowest, lower_end), (highest, upper_end)):
            most = _larger(builder, _larger(builder, *vectors[:2]), _larger(builder, *vectors[2:]))
            builder.store(_largest_lane(builder, most), end)
        return context.get_dummy_value()

    return types.void(sums, high_sums, biases, figures, stride, of_row, apart, upper, lower_end, upper_end), generate
