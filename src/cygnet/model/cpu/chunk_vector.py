"""Vector code of the chunk kernel, written as LLVM instructions: what no loop would be compiled to.

A *panel* is `ROWS` rows (query heads of consecutive queries), and the lanes of all vectors are rows of one panel:

    queries  [steps, ROWS]        a step is two elements of bf16 or one of fp32, so always 32 bits
    scores   [keys, ROWS] fp32    one key of the cache at a time is spread over the lanes and multiplied
    weights  [key steps, ROWS]    two keys (bf16) or one (fp32) to a step
    values   [key steps, BLOCK]   for every `BLOCK` value dims; one (pair) at a time is spread over the lanes
    sums     [value dim, ROWS] fp32

Keys need no packing and the softmax no sums across lanes. Addresses of rows are int64, in memory.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cygnet.model.cpu.chunk_layout import BLOCK, KEYS, ROWS

# Numba has no use for assembly of its own and so does not load what reads it.
llvmlite.binding.initialize_native_asmparser()

LAZY = 8.0
"""Sums are rescaled when a row's largest score has grown by more than this factor's logarithm to base 2."""

_I64, _WORD, _HALF, _FLOAT, _BIT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType(), ir.IntType(1)
_WORDS, _FLOATS = ir.VectorType(_WORD, BLOCK), ir.VectorType(_FLOAT, BLOCK)
_VECTORS = ROWS // BLOCK
_F32 = types.CPointer(types.float32)
_ADDRESSES = types.CPointer(types.int64)

# 2 ** r for 0 <= r < 1, fitted for the least relative error: 3e-6 and 2e-9.
_POWER_SHORT = (1.0000002593, 0.69300383451, 0.24144275670, 0.052011460935, 0.013534167747)
_POWER = (
    *(1.0000000019, 0.69314698384, 0.24022983627, 0.055483341987),
    *(0.0096788409917, 0.0012439687868, 0.00021702255320),
)


class Emitter:
    """Writes vector instructions for elements of one type on one machine."""

    def __init__(self, context: Any, builder: Any, pointer: Any) -> None:
        self.builder = builder
        self.bf16 = pointer.dtype == types.uint16
        # As numba compiles for it: its own settings may ask for less than the machine has.
        features = context.codegen().magic_tuple()[2].split(",")
        self.wide = "+avx512f" in features and "+avx512dq" in features
        self.pairs = self.bf16 and "+avx512bf16" in features
        self.keys_at_once = KEYS if self.wide else 2
        """So that the sums of a panel fit the registers."""

    def integer(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def at(self, pointer: Any, index: Any, kind: ir.Type) -> Any:
        """pointer[index], where both address and index count elements of `kind`."""
        index = self.integer(index) if isinstance(index, int) else index
        return self.builder.gep(self.builder.bitcast(pointer, kind.as_pointer()), [index])

    def vector(self, pointer: Any, index: Any) -> Any:
        """The floats at vector number `index`."""
        return self.builder.load(self.at(pointer, index, _FLOATS), align=4)

    def put(self, value: Any, pointer: Any, index: Any) -> None:
        self.builder.store(value, self.at(pointer, index, value.type), align=4)

    def address(self, addresses: Any, index: Any) -> Any:
        return self.builder.load(self.at(addresses, index, _I64))

    def spread(self, scalar: Any) -> Any:
        """The scalar in all lanes."""
        kind = ir.VectorType(scalar.type, BLOCK)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_WORD, 0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * BLOCK))

    def floats(self, value: float) -> Any:
        return ir.Constant(_FLOATS, [value] * BLOCK)

    def words(self, value: int) -> Any:
        return ir.Constant(_WORDS, [value] * BLOCK)

    def shuffle(self, a: Any, b: Any, order: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(order)), order))

    def call(self, name: str, *values: Any) -> Any:
        """LLVM's function of that name, lane by lane."""
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
        return self.builder.call(self.builder.module.declare_intrinsic(f"llvm.{name}.v16f32", (), kind), values)

    def instruction(self, assembly: str, places: str, *values: Any, result: Any = _FLOATS) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(ir.InlineAsm(kind, assembly, places), values)

    def larger(self, a: Any, b: Any) -> Any:
        """The larger of each lane; `b` where `a` or `b` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def factors(self, words: Any) -> list[Any]:
        """32 bits per lane as what `add_products` multiplies."""
        if not self.bf16:
            return [self.builder.bitcast(words, _FLOATS)]
        if self.pairs:
            return [words]
        low = self.builder.shl(words, self.words(16))
        high = self.builder.and_(words, self.words(0xFFFF0000))
        return [self.builder.bitcast(low, _FLOATS), self.builder.bitcast(high, _FLOATS)]

    def add_products(self, total: Any, a: list[Any], b: list[Any]) -> Any:
        if self.pairs:
            return self.instruction("vdpbf16ps $2, $1, $0", "=v,v,v,0", a[0], b[0], total)
        for x, y in zip(a, b, strict=True):
            total = self.call("fma", x, y, total)
        return total

    def loop(self, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """`for i in range(count): carried = body(i, carried)`, at least once; what is carried out of it."""
        builder, before = self.builder, self.builder.block
        inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        i = builder.phi(_I64)
        values = [builder.phi(value.type) for value in carried]
        results = body(i, list(values))
        following = builder.add(i, self.integer(1), flags=["nsw"])
        for phi, first, later in zip([i, *values], [self.integer(0), *carried], [following, *results], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results

    def products(
        self, rows: Any, steps: Any, sums: list[Any], factors: Callable[[int, Any], list[Any]], at_once: int = 1
    ) -> list[Any]:
        """sums[k * vectors + v] + sum over steps of rows[step, v] * factor(k, step).

        `factors(k, i)` gives those of `at_once` steps, from i * at_once on; `steps` counts these.
        """

        def step(i: Any, sums: list[Any]) -> list[Any]:
            first = self.builder.mul(i, self.integer(_VECTORS * at_once))
            lanes = []
            for v in range(_VECTORS * at_once):
                place = self.at(rows, self.builder.add(first, self.integer(v)), _WORDS)
                lanes.append(self.factors(self.builder.load(place, align=4)))
            results = []
            for k in range(len(sums) // _VECTORS):
                totals = sums[k * _VECTORS : (k + 1) * _VECTORS]
                for n, word in enumerate(factors(k, i)):
                    same, those = self.factors(self.spread(word)), lanes[n * _VECTORS : (n + 1) * _VECTORS]
                    totals = [self.add_products(total, lane, same) for total, lane in zip(totals, those, strict=True)]
                results += totals
            return results

        return self.loop(steps, sums, step)

    def power_of_two(self, x: Any) -> Any:
        """2 ** x for x below 128; 0 for -infinity; NaN stays NaN."""
        builder, coefficients = self.builder, _POWER_SHORT if self.bf16 else _POWER
        if self.wide:
            r = self.instruction("vreduceps $$9, $1, $0", "=v,v", x)  # x - floor(x), 0 for infinity
        else:
            x = self.larger(self.floats(-127.0), x)
            whole = self.call("floor", x)
            r = builder.fsub(x, whole)
        result = self.floats(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = self.call("fma", result, r, self.floats(coefficient))
        if self.wide:
            return self.instruction("vscalefps $2, $1, $0", "=v,v,v", result, x)  # result * 2 ** floor(x)
        biased = builder.add(builder.fptosi(whole, _WORDS), self.words(127))
        return builder.fmul(result, builder.bitcast(builder.shl(biased, self.words(23)), _FLOATS))

    def transposed(self, rows: list[Any]) -> list[Any]:
        """16 vectors of 16 lanes, lanes and vectors exchanged."""
        for width in (1, 2, 4, 8):
            low = [lane + BLOCK - width if lane & width else lane for lane in range(BLOCK)]
            high = [lane + BLOCK if lane & width else lane + width for lane in range(BLOCK)]
            result = list(rows)
            for i in range(BLOCK):
                if not i & width:
                    result[i] = self.shuffle(rows[i], rows[i + width], low)
                    result[i + width] = self.shuffle(rows[i], rows[i + width], high)
            rows = result
        return rows

    def rounded(self, value: Any) -> Any:
        """Floats as 16-bit bf16, to the nearest, ties to even, NaN kept."""
        builder, kind = self.builder, ir.VectorType(_HALF, BLOCK)
        if self.pairs:
            return self.instruction("vcvtneps2bf16 $1, $0", "=v,v", value, result=kind)
        bits = builder.bitcast(value, _WORDS)
        odd = builder.and_(builder.lshr(bits, self.words(16)), self.words(1))
        nearest = builder.add(bits, builder.add(odd, self.words(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", value, value)
        upper = builder.lshr(builder.select(is_nan, self.words(0x7FC00000), nearest), self.words(16))
        return builder.trunc(upper, kind)

    def rounded_pair(self, low: Any, high: Any) -> Any:
        """Two vectors of weights as words of two bf16, to the nearest, ties up, NaN kept."""
        builder, half = self.builder, self.words(0x8000)
        low = builder.lshr(builder.add(builder.bitcast(low, _WORDS), half), self.words(16))
        high = builder.and_(builder.add(builder.bitcast(high, _WORDS), half), self.words(0xFFFF0000))
        return builder.or_(low, high)


@intrinsic
def pointer_like(typing_context: Any, pointer: Any, address: Any) -> Any:
    """The address as a pointer to what `pointer` points to."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], args[0].type)

    return pointer(pointer, types.int64), generate


@intrinsic
def pack_queries(typing_context: Any, addresses: Any, offset: Any, queries: Any) -> Any:
    """32 bits of `BLOCK` steps, `offset` bytes behind each of `BLOCK` addresses, into as many lanes of `queries`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit, rows = Emitter(context, builder, queries), []
        for row in range(BLOCK):
            place = builder.add(emit.address(args[0], row), args[1])
            rows.append(builder.load(builder.inttoptr(place, _WORDS.as_pointer()), align=4))
        for step, lanes in enumerate(emit.transposed(rows)):
            emit.put(lanes, args[2], step * _VECTORS)
        return context.get_dummy_value()

    return types.void(_ADDRESSES, types.int64, queries), generate


def _is_narrow(elements: Any, cached: Any) -> bool:
    """Whether the cache has bf16 where all else is in fp32: numba's types of pointers to both."""
    return bool(cached.dtype == types.uint16 and elements.dtype == types.float32)


@intrinsic
def pack_values(typing_context: Any, addresses: Any, offset: Any, values: Any, cached: Any) -> Any:
    """`BLOCK` value dims, `offset` bytes behind each of a step's addresses, side by side; `cached` is any pointer to
    what the cache holds."""
    narrow = _is_narrow(values, cached)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder, values)
        kind = ir.VectorType(_HALF if emit.bf16 or narrow else _WORD, BLOCK)
        rows = []
        for key in range(2 if emit.bf16 else 1):
            place = builder.inttoptr(builder.add(emit.address(args[0], key), args[1]), kind.as_pointer())
            rows.append(builder.load(place, align=2))
        if emit.bf16:
            order = [lane // 2 + BLOCK * (lane % 2) for lane in range(2 * BLOCK)]
            rows = [emit.shuffle(rows[0], rows[1], order)]
        if narrow:
            rows = [builder.shl(builder.zext(rows[0], _WORDS), emit.words(16))]
        emit.put(rows[0], args[2], 0)
        return context.get_dummy_value()

    return types.void(_ADDRESSES, types.int64, values, cached), generate


@intrinsic
def score_keys(typing_context: Any, queries: Any, keys: Any, words: Any, scores: Any, cached: Any) -> Any:
    """scores[k, row] = query of the row . key of address keys[k], for `KEYS` keys of `words` times 32 bits; `cached` is
    any pointer to what the cache holds."""
    narrow = _is_narrow(queries, cached)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder, queries)
        for first in range(0, KEYS, emit.keys_at_once):
            numbers = range(first, first + emit.keys_at_once)
            places = [builder.inttoptr(emit.address(args[1], k), _WORD.as_pointer()) for k in numbers]
            zeros = [emit.floats(0.0)] * (len(places) * _VECTORS)

            def key(k: int, step: Any, places: list[Any] = places) -> list[Any]:
                word = builder.load(emit.at(places[k], step, _WORD))
                if not narrow:
                    return [word]
                return [
                    builder.shl(word, ir.Constant(_WORD, 16)),
                    builder.and_(word, ir.Constant(_WORD, 0xFFFF0000)),
                ]

            for i, total in enumerate(emit.products(args[0], args[2], zeros, key, 2 if narrow else 1)):
                emit.put(total, args[3], first * _VECTORS + i)
        return context.get_dummy_value()

    return types.void(queries, _ADDRESSES, types.int64, _F32, cached), generate


@intrinsic
def add_values(typing_context: Any, weights: Any, steps: Any, values: Any, sums: Any) -> Any:
    """sums[d, row] += weights[:, row] . values[:, d], for the first `KEYS` dims d of a block."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder, weights)
        for first in range(0, KEYS, emit.keys_at_once):
            count = emit.keys_at_once * _VECTORS
            before = [emit.vector(args[3], first * _VECTORS + i) for i in range(count)]

            def value(k: int, step: Any, first: int = first) -> list[Any]:
                place = builder.add(builder.mul(step, emit.integer(BLOCK)), emit.integer(first + k))
                return [builder.load(emit.at(args[2], place, _WORD))]

            for i, total in enumerate(emit.products(args[0], args[1], before, value)):
                emit.put(total, args[3], first * _VECTORS + i)
        return context.get_dummy_value()

    return types.void(weights, types.int64, weights, _F32), generate


def _grown(emit: Emitter, scores: Any, count: Any, state: Any, factor: Any) -> tuple[list[Any], Any]:
    """The rows' largest scores so far, and whether any of them grew; `state` is brought up to date but for the sums."""
    builder = emit.builder

    def four_keys(i: Any, largest: list[Any]) -> list[Any]:
        first, results = builder.mul(i, emit.integer(4 * _VECTORS)), []
        for v in range(_VECTORS):
            a, b, c, d = (emit.vector(scores, builder.add(first, emit.integer(k * _VECTORS + v))) for k in range(4))
            results.append(emit.larger(emit.larger(emit.larger(a, b), emit.larger(c, d)), largest[v]))
        return results

    lowest = [emit.floats(float("-inf"))] * _VECTORS
    found = emit.loop(builder.sdiv(count, emit.integer(4)), lowest, four_keys)
    largest, grew_at_all = [], emit.integer(0)
    for v in range(_VECTORS):
        before, now = emit.vector(state, v), builder.fmul(found[v], factor)
        grew = builder.fcmp_ordered(">", now, builder.fadd(before, emit.floats(LAZY)))
        largest.append(builder.select(grew, now, before))
        kept = emit.power_of_two(builder.fsub(before, largest[v]))
        kept = builder.select(grew, kept, emit.floats(1.0))
        emit.put(largest[v], state, v)
        emit.put(kept, state, 2 * _VECTORS + v)
        emit.put(builder.fmul(emit.vector(state, _VECTORS + v), kept), state, _VECTORS + v)
        bits = builder.bitcast(grew, ir.IntType(BLOCK))
        grew_at_all = builder.or_(grew_at_all, builder.zext(bits, _I64))
    return largest, grew_at_all


@intrinsic
def weigh(typing_context: Any, scores: Any, count: Any, state: Any, factor: Any, weights: Any) -> Any:
    """weights[k, row] = 2 ** (factor * scores[k, row] - largest[row]) for `count` keys, a multiple of `KEYS`.

    `state` [3, ROWS] is `largest` so far, times `factor`, the sum of weights so far, and what older sums are to be
    multiplied with; returns 0 if that is 1 in all rows. `largest` lags behind by up to `LAZY`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder, weights)
        scores, count, state, weights_at = args[0], args[1], args[2], args[4]
        factor = emit.spread(args[3])
        largest, grew = _grown(emit, scores, count, state, factor)
        negated = [builder.fsub(emit.floats(0.0), value) for value in largest]

        def two_keys(i: Any, totals: list[Any]) -> list[Any]:
            first, pairs = builder.mul(i, emit.integer(2 * _VECTORS)), []
            for place in range(2 * _VECTORS):
                score = emit.vector(scores, builder.add(first, emit.integer(place)))
                pairs.append(emit.power_of_two(emit.call("fma", score, factor, negated[place % _VECTORS])))
            if emit.bf16:
                first = builder.mul(i, emit.integer(_VECTORS))
                packed = [emit.rounded_pair(pairs[v], pairs[v + _VECTORS]) for v in range(_VECTORS)]
            else:
                packed = pairs
            for place, value in enumerate(packed):
                emit.put(value, weights_at, builder.add(first, emit.integer(place)))
            return [builder.fadd(total, value) for total, value in zip(totals, pairs, strict=True)]

        zeros = [emit.floats(0.0)] * (2 * _VECTORS)
        totals = emit.loop(builder.sdiv(count, emit.integer(2)), zeros, two_keys)
        for v in range(_VECTORS):
            total = builder.fadd(totals[v], totals[v + _VECTORS])
            emit.put(builder.fadd(emit.vector(state, _VECTORS + v), total), state, _VECTORS + v)
        return grew

    return types.int64(_F32, types.int64, _F32, types.float32, weights), generate


@intrinsic
def write_block(typing_context: Any, sums: Any, factors: Any, addresses: Any, offset: Any, like: Any) -> Any:
    """sums[d, row] * factors[row] of `BLOCK` dims d and as many rows, `offset` bytes behind the rows' addresses.

    They are written as the elements that `like` points to.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder, like)
        factors = emit.vector(args[1], 0)
        rows = [builder.fmul(emit.vector(args[0], dim * _VECTORS), factors) for dim in range(BLOCK)]
        for row, value in enumerate(emit.transposed(rows)):
            result = emit.rounded(value) if emit.bf16 else value
            place = builder.add(emit.address(args[2], row), args[3])
            builder.store(result, builder.inttoptr(place, result.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(_F32, _F32, _ADDRESSES, types.int64, like), generate
