"""Triton kernels around the matrix products: RMS norm (with residual), rotation, gated activation.

All compute in fp32 and round once, to the output's dtype. Not run on a GPU: run in Triton's interpreter only, and
compiled for GPUs.
"""

import triton
import triton.language as tl

# fmt: off
# Arguments are grouped by meaning: tensors; scalars and strides; shapes and tiles.


@triton.jit
def rms_norm_kernel(
    out, total, x, residual, weight,
    eps, x_token_stride, x_row_stride,
    SIZE: tl.constexpr, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program per token: each of its ROWS rows [SIZE] is normed and multiplied by its own row of `weight`.

    With a residual (contiguous, as `out` and `total` are), `total` gets x + residual, and that is what is normed.
    """
    token = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS_PAD)[:, None]
    dims = tl.arange(0, SIZE_PAD)[None, :]
    inside = (rows < ROWS) & (dims < SIZE)
    place = token * (ROWS * SIZE) + rows * SIZE + dims
    values = tl.load(x + token * x_token_stride + rows * x_row_stride + dims, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        # The sum goes on in the layers' dtype, so the norm must see it rounded.
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean_square = tl.sum(values * values, 1) / SIZE
    scaled = values * tl.rsqrt(mean_square + eps)[:, None]
    scaled *= tl.load(weight + rows * SIZE + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    out, heads, cos, sin,
    token_stride, head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
):
    """One program per token: dimensions i and i + HALF of every head turn by the token's angle i, the rest is copied.

    `cos`, `sin` [T, HALF] and `out` are contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, HEADS_PAD)[:, None]
    pair = tl.arange(0, HALF_PAD)[None, :]
    inside = (rows < NUM_HEADS) & (pair < HALF)
    source = heads + token * token_stride + rows * head_stride
    target = out + token * (NUM_HEADS * HEAD_DIM) + rows * HEAD_DIM
    cosine = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + pair, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF + pair, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)
    if HEAD_DIM > 2 * HALF:
        dims = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        inside = (rows < NUM_HEADS) & (dims < HEAD_DIM)
        tl.store(target + dims, tl.load(source + dims, mask=inside, other=0.0), mask=inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation called ACTIVATION of `x` (fp32)."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # gelu_pytorch_tanh: (1 + tanh z) / 2 is sigmoid(2 z).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated_kernel(out, x, row_stride, SIZE: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Program (r, c): columns of tile c of row r: activation(gate) * up, for `x` [rows, 2 * SIZE] = [gate | up]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded as between two operators, so that fused and plain layers differ less.
    hidden = activate(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, (hidden * up).to(out.dtype.element_ty), mask=inside)
