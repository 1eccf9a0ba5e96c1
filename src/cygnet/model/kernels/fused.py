"""The Triton kernels behind the `Kernels` interface. Importing this imports Triton.

Not run on a GPU: run in Triton's interpreter only, and compiled for GPUs (docs/gpu.md).
"""

import torch
from torch import Tensor

from cygnet.model.description import MoeSpec
from cygnet.model.kernels import MoeParameters, elementwise, grouped_moe, interpreted, tiles
from cygnet.model.kernels.tiles import power_of_two

ACTIVATIONS = frozenset(("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"))
_TINY = 1e-20
_COLUMNS = 1024
"""Columns of a row that one program of an elementwise kernel handles; a guess."""
_SORT_TILE = 1024
"""Pairs looked at at once when sorting by expert; a guess."""


class TritonKernels:
    """See `Kernels`. Stateless."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size, rows = x.shape[-1], 1 if weight.dim() == 1 else weight.shape[0]
        heads = x.view(-1, rows, size) if x.dim() != 3 or rows == 1 else x
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(heads, None, out, out, weight, eps, rows)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = torch.empty_like(total)
        self._norm(x.view(-1, 1, x.shape[-1]), residual.contiguous(), total, out, weight, eps, 1)
        return total, out

    def _norm(
        self, x: Tensor, residual: Tensor | None, total: Tensor, out: Tensor, weight: Tensor, eps: float, rows: int
    ) -> None:
        """`x` [T, rows, size], its last dimension contiguous."""
        size = x.shape[-1]
        elementwise.rms_norm_kernel[(x.shape[0],)](
            out,
            total,
            x,
            residual,
            weight,
            eps,
            *x.stride()[:2],
            SIZE=size,
            ROWS=rows,
            ROWS_PAD=power_of_two(rows),
            SIZE_PAD=power_of_two(size),
            HAS_RESIDUAL=residual is not None,
            num_warps=_warps(power_of_two(rows) * power_of_two(size)),
        )

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_tokens, num_heads, head_dim = heads.shape
        half = cos.shape[-1]
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        elementwise.rotate_kernel[(num_tokens,)](
            out,
            heads,
            cos.contiguous(),
            sin.contiguous(),
            *heads.stride()[:2],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            HEADS_PAD=power_of_two(num_heads),
            HALF_PAD=power_of_two(half),
            REST_PAD=power_of_two(max(1, head_dim - 2 * half)),
            num_warps=_warps(power_of_two(num_heads) * power_of_two(half)),
        )
        return out

    def supports_activation(self, activation: str) -> bool:
        return activation in ACTIVATIONS

    def gated(self, x: Tensor, activation: str) -> Tensor:
        size = x.shape[-1] // 2
        rows = x.reshape(-1, 2 * size)
        out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
        tile = min(_COLUMNS, power_of_two(size))
        elementwise.gated_kernel[(rows.shape[0], -(-size // tile))](
            out, rows, rows.stride(0), SIZE=size, TILE=tile, ACTIVATION=activation
        )
        return out

    def moe(self, spec: MoeSpec, x: Tensor, logits: Tensor, parameters: MoeParameters) -> Tensor:
        experts, weights = self.route(spec, logits, parameters.selection_bias)
        num_pairs, size, hidden_size = experts.numel(), spec.intermediate_size, x.shape[-1]
        tile = tiles.moe_tiles(num_pairs, spec.num_experts, x.itemsize)
        order, *tile_lists = self.sort(experts, spec.num_experts, tile.rows)
        widen = interpreted() and x.dtype == torch.bfloat16
        gemm = {
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "INNER": tile.inner,
            "WIDEN": widen,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        num_tiles = len(tile_lists[0])
        hidden = torch.empty(num_pairs, size, dtype=x.dtype, device=x.device)
        grouped_moe.grouped_gate_up_kernel[(num_tiles, -(-size // tile.columns))](
            hidden,
            x,
            parameters.gate_up,
            parameters.gate_up_bias,
            order,
            *tile_lists,
            x.stride(0),
            0.0 if spec.limit is None else spec.limit,
            spec.up_offset,
            IN=hidden_size,
            SIZE=size,
            TOP_K=spec.top_k,
            ACTIVATION=spec.activation,
            HAS_BIAS=parameters.gate_up_bias is not None,
            HAS_LIMIT=spec.limit is not None,
            **gemm,
        )
        pairs = torch.empty(num_pairs, hidden_size, dtype=x.dtype, device=x.device)
        grouped_moe.grouped_down_kernel[(num_tiles, -(-hidden_size // tile.columns))](
            pairs,
            hidden,
            parameters.down,
            parameters.down_bias,
            order,
            *tile_lists,
            SIZE=size,
            OUT=hidden_size,
            HAS_BIAS=parameters.down_bias is not None,
            **gemm,
        )
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        columns = min(_COLUMNS, power_of_two(hidden_size))
        grouped_moe.combine_kernel[(x.shape[0], -(-hidden_size // columns))](
            out, pairs, weights, SIZE=hidden_size, TOP_K=spec.top_k, TILE=columns
        )
        return out

    def route(self, spec: MoeSpec, logits: Tensor, selection_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Experts (int32) and weights (fp32) of each token, [T, top_k], from `logits` [T, num_experts] in fp32."""
        shape = (logits.shape[0], spec.top_k)
        experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
        weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
        grouped_moe.route_kernel[(logits.shape[0],)](
            experts,
            weights,
            logits.contiguous(),
            selection_bias,
            spec.routed_scaling,
            NUM_EXPERTS=spec.num_experts,
            TOP_K=spec.top_k,
            EXPERTS_PAD=power_of_two(spec.num_experts),
            TOP_K_PAD=power_of_two(spec.top_k),
            SIGMOID=spec.scoring == "sigmoid",
            NORMALISE=spec.norm_topk_prob,
            HAS_BIAS=selection_bias is not None,
            TINY=_TINY,
            num_warps=1,
        )
        return experts, weights

    def sort(self, experts: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pairs sorted by expert, stably, and the tiles of a product over them; all int32.

        Returns `order` [pairs]; per tile its expert (-1: unused) and its first row; per expert the end of its rows.
        """
        num_pairs, device = experts.numel(), experts.device
        # Each expert that got any pairs may leave one tile part empty.
        num_tiles = min(num_pairs, num_pairs // tile_rows + num_experts)
        counts, row_ends = torch.empty(2, num_experts, dtype=torch.int32, device=device).unbind()
        order = torch.empty(num_pairs, dtype=torch.int32, device=device)
        tile_experts = torch.full((num_tiles,), -1, dtype=torch.int32, device=device)
        first_rows = torch.empty(num_tiles, dtype=torch.int32, device=device)
        tile = min(_SORT_TILE, power_of_two(num_pairs))
        grouped_moe.count_kernel[(num_experts,)](counts, experts, num_pairs, TILE=tile)
        grouped_moe.sort_kernel[(num_experts,)](
            order,
            tile_experts,
            first_rows,
            row_ends,
            experts,
            counts,
            num_pairs,
            NUM_EXPERTS=num_experts,
            EXPERTS_PAD=power_of_two(num_experts),
            TILE=tile,
            TILE_ROWS=tile_rows,
        )
        return order, tile_experts, first_rows, row_ends


def _warps(elements: int) -> int:
    """Warps for a program of that many elements: eight per thread, a guess."""
    return max(1, min(16, elements // 256))
