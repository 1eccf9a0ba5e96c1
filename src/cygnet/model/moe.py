"""Mixture of experts: routing in fp32, then one pair of products per expert that got tokens."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cygnet.model.description import MoeSpec
from cygnet.model.kernels import MoeParameters
from cygnet.model.layers import MLPS, WeightSlots, activation, gated, parameter, wide_dtype

if TYPE_CHECKING:
    from cygnet.model.ops import StepOps

_TINY = 1e-20


@MLPS.register(MoeSpec.kind)
class MoeLayer(nn.Module):
    """Top-k routed gated MLPs; a token's result does not depend on the tokens beside it, up to rounding."""

    def __init__(
        self,
        spec: MoeSpec,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        """Experts are kept in `dtype`, whatever `weight_dtype` is."""
        super().__init__()
        self.spec = spec
        self.act = spec.activation
        activation(self.act)  # an unknown one is an error now
        wide, size = wide_dtype(dtype), spec.intermediate_size
        experts = spec.num_experts
        self.router = parameter(experts, hidden_size, dtype=wide, device=device)
        self.router_bias = parameter(experts, dtype=wide, device=device) if spec.router_bias else None
        self.selection_bias = parameter(experts, dtype=wide, device=device) if spec.selection_bias else None
        self.gate_up = parameter(experts, 2 * size, hidden_size, dtype=dtype, device=device)
        self.gate_up_bias = parameter(experts, 2 * size, dtype=dtype, device=device) if spec.bias else None
        self.down = parameter(experts, hidden_size, size, dtype=dtype, device=device)
        self.down_bias = parameter(experts, hidden_size, dtype=dtype, device=device) if spec.bias else None

    def weight_slots(self) -> WeightSlots:
        yield "router.weight", self.router
        if self.router_bias is not None:
            yield "router.bias", self.router_bias
        if self.selection_bias is not None:
            yield "router.selection_bias", self.selection_bias
        size = self.spec.intermediate_size
        for expert in range(self.spec.num_experts):
            yield f"experts.{expert}.gate.weight", self.gate_up[expert, :size]
            yield f"experts.{expert}.up.weight", self.gate_up[expert, size:]
            yield f"experts.{expert}.down.weight", self.down[expert]
            if self.gate_up_bias is not None and self.down_bias is not None:
                yield f"experts.{expert}.gate.bias", self.gate_up_bias[expert, :size]
                yield f"experts.{expert}.up.bias", self.gate_up_bias[expert, size:]
                yield f"experts.{expert}.down.bias", self.down_bias[expert]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights, both [num_tokens, top_k]; weights in fp32 (fp64 for fp64)."""
        logits = self._logits(x)
        scores = logits.sigmoid() if self.spec.scoring == "sigmoid" else logits.softmax(-1)
        ranked = scores if self.selection_bias is None else scores + self.selection_bias
        experts = ranked.topk(self.spec.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.spec.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return experts, weights * self.spec.routed_scaling

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.router.dtype), self.router, self.router_bias)

    def forward(self, x: Tensor, ops: "StepOps") -> Tensor:
        learned = MoeParameters(self.gate_up, self.down, self.selection_bias, self.gate_up_bias, self.down_bias)
        fused = ops.experts(self.spec, x, self._logits, learned)
        if fused is not None:
            return fused
        experts, weights = self.route(x)
        top_k = self.spec.top_k
        # Sorting the token-expert pairs by expert makes each expert's inputs one slice.
        order = experts.flatten().argsort(stable=True)
        inputs = x.index_select(0, order // top_k)
        counts = torch.bincount(experts.flatten(), minlength=self.spec.num_experts).tolist()
        sorted_outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            rows = slice(start, start + count)
            self._expert(expert, inputs[rows], ops, out=sorted_outputs[rows])
            start += count
        outputs = torch.empty_like(sorted_outputs).index_copy_(0, order, sorted_outputs)
        outputs = outputs.view(-1, top_k, x.shape[-1]).to(weights.dtype)
        return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1).to(x.dtype)

    def _expert(self, expert: int, x: Tensor, ops: "StepOps", *, out: Tensor) -> None:
        """One expert's MLP over `x` [tokens, hidden_size], into `out` of the same shape."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        projected = F.linear(x, self.gate_up[expert], bias)
        spec = self.spec
        if spec.limit is None and spec.up_offset == 0.0:
            hidden = ops.gated(projected, self.act)
        else:
            hidden = gated(projected, activation(self.act), limit=spec.limit, up_offset=spec.up_offset)
        torch.mm(hidden, self.down[expert].t(), out=out)
        if self.down_bias is not None:
            out.add_(self.down_bias[expert])
