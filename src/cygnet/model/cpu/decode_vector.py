"""The two products of decode attention on bf16, for up to four query heads of a KV head at once.

scores    four keys and four heads at a time: 16 sums of 16 lanes, folded into one vector of 16 scores
values    two keys at a time: their values are interleaved, so that a pair of weights multiplies a pair of values
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cygnet.model.cpu.jit import jit
from cygnet.model.cpu.vector import LANES, ask_for, counted_loop, dot_bf16, splat, vector_at

TILE = 32
"""Keys whose scores are worked out together."""
KEYS = 4
HEADS = 4
STEP = 32
"""What key and value dims must be a multiple of."""

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, LANES), ir.VectorType(_FLOAT, LANES)
_BYTES = ir.IntType(8).as_pointer()
_SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _shuffle(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_WORD, len(places)), places))


def fold(builder: Any, vectors: list[Any]) -> Any:
    """The sums of 16 vectors of 16 lanes, as one vector in their order."""
    segment = LANES
    while len(vectors) > 1:
        half = segment // 2
        starts = range(0, LANES, segment)
        low = [start + i for start in starts for i in range(half)]
        places = [*low, *(LANES + i for i in low)]
        vectors = [
            builder.fadd(
                _shuffle(builder, one, other, places), _shuffle(builder, one, other, [i + half for i in places])
            )
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        segment = half
    return vectors[0]


def fetch_line(builder: Any, cache: Any, row: Any, dim: Any, at: Any) -> None:
    """Prefetch the line at element `at` of a row, or the row's last. A few at a time, between products: the core waits
    when more are under way than it can keep track of."""
    last = builder.sub(dim, _long(STEP))
    at = builder.select(builder.icmp_signed("<", at, last), at, last)
    ask_for(builder, builder.bitcast(builder.gep(cache, [builder.add(builder.mul(row, dim), at)]), _BYTES), _long(0))


def _scores(heads: int) -> Any:
    @intrinsic
    def score(
        typing_context: Any, query: Any, keys: Any, rows: Any, dim: Any, scale: Any, scores: Any, values: Any,
        following: Any, value_dim: Any,
    ) -> Any:  # fmt: skip
        """scores[h * TILE + k] = query[h] . key[rows[k]] * scale for KEYS keys; query bf16 [heads, dim]."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            query, keys, rows, dim, scale, scores, values, following, value_dim = args
            later = [builder.load(builder.gep(following, [_long(k)])) for k in range(KEYS)]
            starts = [builder.mul(builder.load(builder.gep(rows, [_long(k)])), dim) for k in range(KEYS)]
            zero = ir.Constant(_FLOATS, [0.0] * LANES)

            def step(index: Any, sums: list[Any]) -> list[Any]:
                at = builder.mul(index, _long(STEP))
                sums = list(sums)
                for row in later:
                    fetch_line(builder, values, row, value_dim, at)
                found = [
                    builder.load(vector_at(builder, keys, builder.add(start, at), _WORDS), align=2) for start in starts
                ]
                for h in range(heads):
                    place = builder.add(builder.mul(dim, _long(h)), at)
                    asked = builder.load(vector_at(builder, query, place, _WORDS), align=2)
                    for k in range(KEYS):
                        sums[h * KEYS + k] = dot_bf16(builder, sums[h * KEYS + k], found[k], asked)
                return sums

            sums = counted_loop(builder, builder.sdiv(dim, _long(STEP)), [zero] * (heads * KEYS), step)
            folded = fold(builder, sums + [zero] * (LANES - len(sums)))
            folded = builder.fmul(folded, splat(builder, scale, _FLOATS))
            four = ir.VectorType(_FLOAT, KEYS)
            for h in range(heads):
                some = _shuffle(builder, folded, folded, [h * KEYS + k for k in range(KEYS)])
                builder.store(some, vector_at(builder, scores, _long(h * TILE), four), align=4)
            return context.get_dummy_value()

        return types.void(query, keys, rows, dim, types.float32, scores, values, following, value_dim), generate

    return score


def _values(heads: int) -> Any:
    @intrinsic
    def add(
        typing_context: Any, values: Any, rows: Any, pairs: Any, weights: Any, dim: Any, kept: Any, sums: Any,
        keys: Any, following: Any, key_dim: Any,
    ) -> Any:  # fmt: skip
        """sums[h] = sums[h] * kept[h] + weights[h] . values of rows[0 : 2 * pairs]; weights [heads, TILE / 2] pairs."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim = args
            factors = [splat(builder, builder.load(builder.gep(kept, [_long(h)])), _FLOATS) for h in range(heads)]

            def chunk(index: Any, nothing: list[Any]) -> list[Any]:
                at = builder.mul(index, _long(STEP))
                places = [
                    builder.add(builder.add(builder.mul(dim, _long(h)), at), _long(part * LANES))
                    for h in range(heads)
                    for part in range(2)
                ]
                before = [builder.load(vector_at(builder, sums, place, _FLOATS), align=4) for place in places]
                before = [builder.fmul(value, factors[i // 2]) for i, value in enumerate(before)]
                after = counted_loop(builder, pairs, before, lambda pair, totals: add_pair(at, pair, totals))
                for place, total in zip(places, after, strict=True):
                    builder.store(total, vector_at(builder, sums, place, _FLOATS), align=4)
                return nothing

            def add_pair(at: Any, pair: Any, totals: list[Any]) -> list[Any]:
                found = []
                for k in range(2):
                    place = builder.add(builder.mul(pair, _long(2)), _long(k))
                    fetch_line(builder, keys, builder.load(builder.gep(following, [place])), key_dim, at)
                    row = builder.load(builder.gep(rows, [place]))
                    start = builder.add(builder.mul(row, dim), at)
                    found.append(builder.load(vector_at(builder, values, start, _SHORTS), align=2))
                totals = list(totals)
                for part in range(2):
                    places = [i for lane in range(LANES) for i in (part * LANES + lane, (2 + part) * LANES + lane)]
                    both = builder.bitcast(_shuffle(builder, *found, places), _WORDS)
                    for h in range(heads):
                        place = builder.add(_long(h * TILE // 2), pair)
                        weight = splat(builder, builder.load(builder.gep(weights, [place])), _WORDS)
                        totals[2 * h + part] = dot_bf16(builder, totals[2 * h + part], both, weight)
                return totals

            counted_loop(builder, builder.sdiv(dim, _long(STEP)), [], chunk)
            return context.get_dummy_value()

        return types.void(values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim), generate

    return add


_scores_1, _scores_2, _scores_3, _scores_4 = _scores(1), _scores(2), _scores(3), _scores(4)
_values_1, _values_2, _values_3, _values_4 = _values(1), _values(2), _values(3), _values(4)


@jit
def score_heads(heads, query, keys, rows, dim, scale, scores, values, following, value_dim):
    """Scores of KEYS keys for up to HEADS heads; fetches the values of the KEYS `following` rows."""
    if heads == 4:
        _scores_4(query, keys, rows, dim, scale, scores, values, following, value_dim)
    elif heads == 3:
        _scores_3(query, keys, rows, dim, scale, scores, values, following, value_dim)
    elif heads == 2:
        _scores_2(query, keys, rows, dim, scale, scores, values, following, value_dim)
    else:
        _scores_1(query, keys, rows, dim, scale, scores, values, following, value_dim)


@jit
def add_heads(heads, values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim):
    """Weighted values of up to HEADS heads, added; fetches the keys of as many `following` rows."""
    if heads == 4:
        _values_4(values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim)
    elif heads == 3:
        _values_3(values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim)
    elif heads == 2:
        _values_2(values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim)
    else:
        _values_1(values, rows, pairs, weights, dim, kept, sums, keys, following, key_dim)
