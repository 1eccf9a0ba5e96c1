"""Sixteen lanes at a time, where the compiler finds no such instruction: pairs of bf16 or int16, multiplied and added.

Weights lie in panels of 64 outputs, as oneDNN packs them for bf16:

    panel 0: inputs 0, 1 of outputs 0 ... 63 | inputs 2, 3 of outputs 0 ... 63 | ...     panel 1: outputs 64 ... 127

so that one load of 16 words of 32 bits holds two inputs of 16 outputs, and a pair of activations is broadcast to all
lanes. On x86 with AVX-512 a step is one `vdpbf16ps` or `vpdpwssd`; elsewhere it is spelled out, and the compiler makes
of it what the machine has.
"""

from collections.abc import Callable, Sequence
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

Dot = Callable[[Any, Any, Any, Any], Any]
"""(builder, sums, pairs of weights, pairs of activations) -> sums"""


def _has(feature: str) -> bool:
    """Whether numba compiles for a CPU with it: its settings may ask for less than the machine has."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return "+avx512f" in features and f"+{feature}" in features


def _instruction(text: str, kind: ir.VectorType) -> Dot:
    shape = ir.FunctionType(kind, [kind, _WORDS, _WORDS])

    def dot(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
        code = ir.InlineAsm(shape, f"{text} $3, $2, $0", "=v,0,v,v")
        return builder.call(code, [sums, weights, pair])

    return dot


def splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    """All lanes `value`."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    zeros = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), zeros)


def _number(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def dot_bf16_plain(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
    """Both halves widened to fp32, two fused multiply-adds."""
    for part in (
        lambda words: builder.shl(words, _number(16)),
        lambda words: builder.and_(words, _number(0xFFFF0000)),
    ):
        one, other = [builder.bitcast(part(words), _FLOATS) for words in (weights, pair)]
        sums = builder.fadd(sums, builder.fmul(one, other, flags=("contract",)), flags=("contract",))
    return sums


def dot_i16_plain(builder: Any, sums: Any, weights: Any, pair: Any) -> Any:
    """Both halves widened to 32 bits, two products."""
    for part in (
        lambda words: builder.ashr(builder.shl(words, _number(16)), _number(16)),
        lambda words: builder.ashr(words, _number(16)),
    ):
        sums = builder.add(sums, builder.mul(part(weights), part(pair)))
    return sums


dot_bf16: Dot = _instruction("vdpbf16ps", _FLOATS) if _has("avx512bf16") else dot_bf16_plain
dot_i16: Dot = _instruction("vpdpwssd", _WORDS) if _has("avx512vnni") else dot_i16_plain


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


def _weights_bf16(builder: Any, weight: Any, index: Any, vector: int) -> Any:
    """Pairs `index` of 16 outputs; `weight` points at 32-bit words."""
    start = builder.add(builder.mul(index, ir.Constant(_LONG, PANEL)), ir.Constant(_LONG, vector * LANES))
    return builder.load(vector_at(builder, weight, start, _WORDS), align=4)


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


def panel_product(
    rows: int, dot: Dot, load_weights: Callable[[Any, Any, Any, int], Any], lane: Any, step_bytes: int
) -> Any:
    """An intrinsic (x, stride, weight, pairs, sums, ahead): sums[r, j] = x[r] . output j of the panel, for `rows` rows.

    `x` points at pairs (32 bits), `stride` of them from row to row; `sums` [rows, PANEL]. With each step one cache line
    is asked for that lies `ahead` bytes behind what the step reads.
    """
    kind = ir.VectorType(lane, LANES)

    @intrinsic
    def product(typing_context: Any, x: Any, stride: Any, weight: Any, pairs: Any, sums: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, stride, weight, pairs, sums, ahead = args
            lines = builder.gep(builder.bitcast(weight, ir.IntType(8).as_pointer()), [ahead])
            starts = [builder.mul(stride, ir.Constant(_LONG, row)) for row in range(rows)]

            def step(index: Any, totals: list[Any]) -> list[Any]:
                weights = [load_weights(builder, weight, index, vector) for vector in range(_VECTORS)]
                totals = list(totals)
                ask_for(builder, lines, builder.mul(index, ir.Constant(_LONG, step_bytes)))
                for row in range(rows):
                    pair = splat(builder, builder.load(builder.gep(x, [builder.add(starts[row], index)])), _WORDS)
                    for vector in range(_VECTORS):
                        at = row * _VECTORS + vector
                        totals[at] = dot(builder, totals[at], weights[vector], pair)
                return totals

            zero = ir.Constant(kind, [0] * LANES)
            totals = counted_loop(builder, pairs, [zero] * (rows * _VECTORS), step)
            for at, total in enumerate(totals):
                builder.store(total, vector_at(builder, sums, ir.Constant(_LONG, at * LANES), kind), align=4)
            return context.get_dummy_value()

        return types.void(x, stride, weight, pairs, sums, types.int64), generate

    return product


def bf16_panel(rows: int, dot: Dot = dot_bf16) -> Any:
    """`panel_product` of bf16 and bf16; `weight` int32*, `sums` float32*."""
    return panel_product(rows, dot, _weights_bf16, _FLOAT, 4 * PANEL)


def i8_panel(rows: int, dot: Dot = dot_i16) -> Any:
    """`panel_product` of int16 and int8; `weight` int8*, `sums` int32*."""
    return panel_product(rows, dot, _weights_i8, _WORD, 2 * PANEL)
