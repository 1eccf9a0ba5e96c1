"""Between the matrix products: norms with residuals, rotated heads, gated activations. Sums are in fp32.

Every kernel exists for bf16 and fp32; `T` below is that type, and the weights of norms are fp32.
"""

import numpy as np

from cygnet.model.cpu.jit import bf16_at, exp, f32_at, float_in, jit, load, shift, store, take

ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@jit
def inverse_rms(x, size, inverse_size, eps):
    """1 / sqrt(mean of squares + eps) of x[0:size]."""
    total = ZERO
    for i in range(size):
        value = load(x, i)
        total += value * value
    return ONE / np.sqrt(total * inverse_size + eps)


@jit
def join(p, residual, branch, normed):
    """Row by row: residual += post_norm(branch); normed = norm(residual). In place.

    p[2:5] are `residual`, `branch`, `normed`, T [rows, size]; p[5] the post-norm's weight or 0; p[6] the norm's
    weight [size]; p[7] rows, p[8] size, p[9] rows per piece; p[10], p[11] the post-norm's and the norm's eps.
    `branch` may be 0: nothing is added.
    """
    rows, size, per_piece = p[7], p[8], p[9]
    weight, post_weight = f32_at(p[6]), f32_at(p[5])
    post_eps, eps, inverse_size = float_in(p, 10), float_in(p, 11), ONE / np.float32(size)
    while True:
        start = take(p, 0) * per_piece
        if start >= rows:
            break
        for row in range(start, min(start + per_piece, rows)):
            x, out = shift(residual, row * size), shift(normed, row * size)
            if p[3] != 0:
                added = shift(branch, row * size)
                if p[5] != 0:
                    factor = inverse_rms(added, size, inverse_size, post_eps)
                    for i in range(size):  # rounded to T before it is added, as a norm of its own would be
                        store(out, i, load(added, i) * factor * load(post_weight, i))
                    for i in range(size):
                        store(x, i, load(x, i) + load(out, i))
                else:
                    for i in range(size):
                        store(x, i, load(x, i) + load(added, i))
            factor = inverse_rms(x, size, inverse_size, eps)
            for i in range(size):
                store(out, i, load(x, i) * factor * load(weight, i))


@jit
def heads(p, qkv, query, key):
    """Norm and rotate query and key heads.

    p[2] `qkv` T [rows, qkv_size], heads first; p[3] `query` T [rows, num_heads, dim], p[4] `key` T [rows, num_kv_heads,
    dim]; p[5] norm weights [num_heads + num_kv_heads, dim] or 0; p[6], p[7] cosines and sines fp32 [rows, half];
    p[8] rows, p[9] qkv_size, p[10] num_heads, p[11] num_kv_heads, p[12] dim, p[13] half; p[14] eps.
    """
    rows, qkv_size, num_heads, num_kv_heads, dim, half = p[8], p[9], p[10], p[11], p[12], p[13]
    eps, inverse_dim = float_in(p, 14), ONE / np.float32(dim)
    while True:
        row = take(p, 0)
        if row >= rows:
            break
        cos, sin = shift(f32_at(p[6]), row * half), shift(f32_at(p[7]), row * half)
        for head in range(num_heads + num_kv_heads):
            x = shift(qkv, row * qkv_size + head * dim)
            if head < num_heads:
                out = shift(query, (row * num_heads + head) * dim)
            else:
                out = shift(key, (row * num_kv_heads + head - num_heads) * dim)
            if p[5] != 0:
                factor = inverse_rms(x, dim, inverse_dim, eps)
                weight = shift(f32_at(p[5]), head * dim)
                for i in range(half):
                    a, b = load(x, i) * factor * load(weight, i), load(x, half + i) * factor * load(weight, half + i)
                    store(out, i, a * load(cos, i) - b * load(sin, i))
                    store(out, half + i, b * load(cos, i) + a * load(sin, i))
                for i in range(2 * half, dim):
                    store(out, i, load(x, i) * factor * load(weight, i))
            else:
                for i in range(half):
                    a, b = load(x, i), load(x, half + i)
                    store(out, i, a * load(cos, i) - b * load(sin, i))
                    store(out, half + i, b * load(cos, i) + a * load(sin, i))
                for i in range(2 * half, dim):
                    store(out, i, load(x, i))


SILU, GELU_TANH = 0, 1
_SQRT_8_OVER_PI = np.float32(1.5957691216057308)
_CUBE = np.float32(0.044715)


@jit
def gated(p, x, out):
    """out = act(gate) * up.

    p[2] `x` T [rows, 2 * size] = [gate | up]; p[3] `out` T [rows, size]; p[4] rows, p[5] size, p[6] rows per piece,
    p[7] which activation.
    """
    rows, size, per_piece, kind = p[4], p[5], p[6], p[7]
    while True:
        start = take(p, 0) * per_piece
        if start >= rows:
            break
        for row in range(start, min(start + per_piece, rows)):
            gate, up, y = shift(x, row * 2 * size), shift(x, row * 2 * size + size), shift(out, row * size)
            if kind == SILU:
                for i in range(size):
                    g = load(gate, i)
                    store(y, i, g / (ONE + exp(-g)) * load(up, i))
            else:
                for i in range(size):  # 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2 u))
                    g = load(gate, i)
                    store(y, i, g / (ONE + exp(-_SQRT_8_OVER_PI * (g + _CUBE * g * g * g))) * load(up, i))


def join_bf16(p):
    join(p, bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]))


def join_f32(p):
    join(p, f32_at(p[2]), f32_at(p[3]), f32_at(p[4]))


def heads_bf16(p):
    heads(p, bf16_at(p[2]), bf16_at(p[3]), bf16_at(p[4]))


def heads_f32(p):
    heads(p, f32_at(p[2]), f32_at(p[3]), f32_at(p[4]))


def gated_bf16(p):
    gated(p, bf16_at(p[2]), bf16_at(p[3]))


def gated_f32(p):
    gated(p, f32_at(p[2]), f32_at(p[3]))
