"""The forward pass of a decoder-only model over paged KV, built from a `ModelDescription`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cygnet.model.moe  # noqa: F401  (registers its MLP kind)
from cygnet.model.attention.backend import AttentionBackend, AttentionPlan
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerGate, LayerKV
from cygnet.model.cpu.programs import Ropes, StepPrograms
from cygnet.model.description import AttentionSpec, GroupName, LayerSpec, ModelDescription, RopeSpec
from cygnet.model.int8 import Int8Weight, compiled
from cygnet.model.layers import MLPS, Linear, RmsNorm, WeightSlots, parameter, wide_dtype
from cygnet.model.ops import StepOps
from cygnet.model.packed import PackedWeight, can_pack
from cygnet.model.replay import ReplayRows, replay_leads, rope_rows
from cygnet.model.rope import cos_sin, inverse_frequencies
from cygnet.model.screened import MOST_ROWS, ScreenedHead
from cygnet.model.widened import WidenedWeight

Plans = Mapping[GroupName, tuple[GroupBatch, AttentionPlan]]
"""Per group in use, its part of the batch and the backend's plan for all of its layers."""


class Attention(nn.Module):
    """Projections, norms and rotation around an attention backend."""

    def __init__(
        self,
        spec: AttentionSpec,
        description: ModelDescription,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        rows = {"q": heads * spec.key_dim, "k": kv_heads * spec.key_dim, "v": kv_heads * spec.value_dim}
        hidden = description.hidden_size
        linear = partial(Linear, dtype=dtype, device=device, weight_dtype=weight_dtype)
        self.qkv = linear(hidden, rows, bias=spec.qkv_bias)
        self.o = linear(heads * spec.value_dim, {"o": hidden}, bias=spec.output_bias)
        self.sinks = parameter(heads, dtype=wide_dtype(dtype), device=device) if spec.sinks else None
        # Query and key heads stand side by side, so one norm with a row of weights per head does both.
        self.qk_norm = (
            RmsNorm(
                spec.key_dim,
                eps=description.norm_eps,
                offset=description.norm_weight_offset,
                dtype=dtype,
                device=device,
                rows=heads + kv_heads,
            )
            if spec.qk_norm
            else None
        )

    def weight_slots(self) -> WeightSlots:
        yield from self.qkv.weight_slots()
        yield from self.o.weight_slots()
        if self.sinks is not None:
            yield "sinks", self.sinks
        if self.qk_norm is not None:
            yield "q_norm.weight", self.qk_norm.weight[: self.spec.num_heads]
            yield "k_norm.weight", self.qk_norm.weight[self.spec.num_heads :]

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        ops: StepOps,
        backend: AttentionBackend,
        plan: AttentionPlan,
        layer_kv: LayerKV,
        rows: Tensor | None,
    ) -> Tensor:
        """What `o` is applied to, of `rows` only if they are given; the KV of all rows is written."""
        query, key, value = ops.heads(self.spec, self.qkv(x), self.qk_norm, rope)
        if rows is not None:
            query = query[rows]
        return backend.attend(self.spec, query, key, value, self.sinks, plan, layer_kv).flatten(1)


class DecoderLayer(nn.Module):
    """norm, attention, residual, norm, MLP, residual; with sandwich norms also after attention and MLP."""

    def __init__(
        self,
        spec: LayerSpec,
        description: ModelDescription,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype,
    ) -> None:
        super().__init__()

        def norm() -> RmsNorm:
            size, eps, offset = description.hidden_size, description.norm_eps, description.norm_weight_offset
            return RmsNorm(size, eps=eps, offset=offset, dtype=dtype, device=device)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.post_attention_norm = norm() if spec.sandwich_norms else None
        self.post_mlp_norm = norm() if spec.sandwich_norms else None
        self.attention = Attention(spec.attention, description, dtype=dtype, device=device, weight_dtype=weight_dtype)
        mlp = MLPS.get(spec.mlp.kind)
        self.mlp = mlp(spec.mlp, description.hidden_size, dtype=dtype, device=device, weight_dtype=weight_dtype)

    def weight_slots(self) -> WeightSlots:
        for name in ("attention_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm"):
            norm = getattr(self, name)
            if norm is not None:
                yield f"{name}.weight", norm.weight
        for name in ("attention", "mlp"):
            for inner, slot in getattr(self, name).weight_slots():
                yield f"{name}.{inner}", slot

    def forward(
        self,
        x: Tensor,
        normed: Tensor,
        next_norm: RmsNorm,
        rope: tuple[Tensor, Tensor],
        ops: StepOps,
        backend: AttentionBackend,
        plan: AttentionPlan,
        layer_kv: LayerKV,
        rows: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual `x` [num_tokens, hidden_size] after this layer, and `next_norm` of it; `normed` is this layer's
        `attention_norm` of `x`.

        With `rows` [n], which `plan` is for then, only these are queries, and the results are [n, hidden_size]. With
        `keep`, all are queries, and only these rows go on after attention.
        """
        attended = self.attention(normed, rope, ops, backend, plan, layer_kv, rows)
        if rows is not None:
            x = x[rows]
        if keep is not None:
            x, attended = x[keep], attended[keep]
        if not len(x):
            return x, x
        x, normed = ops.join(x, self.attention.o(attended), self.post_attention_norm, self.mlp_norm)
        return ops.join(x, self.mlp(normed, ops), self.post_mlp_norm, next_norm)


class HybridModel(nn.Module):
    """A decoder-only model whose layers see all earlier tokens or a window of them. Made by `loader.build_model`.

    Weights are in `dtype` (bf16, fp32 or fp64), except norms, routers and sinks, which are in fp32 (fp64), and
    matrices, which may be in int8, or, where `dtype` is fp32, in bf16 (`weight_dtype`; not those of experts).
    One forward runs at a time; call it under `torch.inference_mode()` to spare autograd's bookkeeping.
    """

    def __init__(
        self,
        description: ModelDescription,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention_backend: AttentionBackend,
        ops: StepOps,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight_dtype = weight_dtype = weight_dtype or dtype
        self.description = description
        self.attention_backend = attention_backend
        self.ops = ops
        self.dtype = dtype
        self.device = device
        vocab, hidden = description.vocab_size, description.hidden_size
        self.embedding: nn.Parameter | None = parameter(vocab, hidden, dtype=weight_dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, description, dtype=dtype, device=device, weight_dtype=weight_dtype)
            for spec in description.layers
        )
        eps, offset = description.norm_eps, description.norm_weight_offset
        self.final_norm = RmsNorm(hidden, eps=eps, offset=offset, dtype=dtype, device=device)
        self.lm_head = (
            None
            if description.tied_embeddings
            else Linear(hidden, {"lm_head": vocab}, bias=False, dtype=dtype, device=device, weight_dtype=weight_dtype)
        )
        self._packed_head: PackedWeight | None = None
        self._screened_head: ScreenedHead | None = None
        self._tied: Int8Weight | WidenedWeight | None = None
        """Head and embedding both, when they are tied and kept in bytes or in bf16 beside fp32; there is no `embedding`
        then."""
        self._programs = StepPrograms() if ops.is_compiled else None
        self._embedding_scale = torch.tensor(description.embedding_scale).to(dtype).item()
        specs = dict.fromkeys(layer.attention.rope for layer in description.layers)
        self._replay_leads = replay_leads(description)
        self._frequencies = {spec: inverse_frequencies(spec).to(device) for spec in specs}

    def weight_slots(self) -> WeightSlots:
        """Every tensor a checkpoint must bring, by Cygnet's name, with the (view of a) parameter that it fills."""
        assert self.embedding is not None
        yield "embedding.weight", self.embedding
        yield "final_norm.weight", self.final_norm.weight
        if self.lm_head is not None:
            yield from self.lm_head.weight_slots()
        for index, layer in enumerate(self.layers):
            for name, slot in layer.weight_slots():  # type: ignore[operator]
                yield f"layers.{index}.{name}", slot

    @torch.no_grad()
    def finish_loading(self, *, pack_tied_head: bool = False, int8: bool = False) -> None:
        """To be called once, when all slots are filled; see `loader.build_model` for the options."""
        if int8:
            self.weight_dtype = torch.int8
        if self.lm_head is None:
            self._finish_tied_head(pack_tied_head, int8)
        for module in self.modules():
            if isinstance(module, Linear):
                module.finish_loading(int8=int8, keep_packed=pack_tied_head)
            elif isinstance(module, RmsNorm):
                module.finish_loading()

    def _finish_tied_head(self, pack: bool, int8: bool) -> None:
        embedding, exact = self.embedding, None
        assert embedding is not None
        if int8:
            self._tied, self.embedding = Int8Weight(embedding, keep_packed=pack), None
            return
        if embedding.dtype != self.dtype:
            self._tied = exact = WidenedWeight(embedding)
            self.embedding = None
        elif pack and can_pack(self.dtype, self.device.type):
            self._packed_head = PackedWeight(embedding)
        in_step = exact is None or exact.padded == exact.shape[1]
        if pack and compiled(self.dtype) and in_step and ScreenedHead.fits(embedding):
            self._screened_head = ScreenedHead(embedding, exact)

    def forward(self, batch: ForwardBatch, plans: Plans | None = None) -> Tensor:
        """Hidden states [rows, hidden_size] after the final norm, in the model's dtype, of the batch's wanted rows.

        Writes the tokens' KV into the batch's slots on the way. `plans` are made from the batch unless given, and must
        not be given for a batch with `exact_from`. In the last layer only the wanted rows are worked out: the KV of the
        others is all that anyone reads of them.
        """
        x = self._embed(batch.token_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        ropes = self._ropes(batch.positions)
        if batch.exact_from is not None:
            return self._replay(batch, x, ropes)
        plans = self._plans(batch) if plans is None else plans
        last = self._last_plan(batch)

        def layers(x: Tensor, ropes: Ropes) -> Tensor:
            return self._run_layers(x, ropes, plans, last, batch.gate)

        # A recorded step can't wait between its layers, and has one number of rows.
        if self._programs is None or last is not None or batch.gate is not None:
            return layers(x, ropes)
        caches = [group.layers for group, _ in plans.values()]
        return self._programs.run(layers, x, ropes, [plan for _, plan in plans.values()], caches)

    def _run_layers(
        self,
        x: Tensor,
        ropes: Ropes,
        plans: Plans,
        last: tuple[Tensor, AttentionPlan] | None,
        gate: LayerGate | None,
    ) -> Tensor:
        """`last`: the rows and the plan of the last layer, where they are others."""
        ops, backend = self.ops, self.attention_backend
        x, normed = ops.join(x, None, None, self.layers[0].attention_norm)  # type: ignore[arg-type]
        for layer, next_norm, spec, (group, index) in self._placed():
            group_batch, plan = plans[group]
            rows = None
            if last is not None and next_norm is self.final_norm:
                rows, plan = last
            rope, layer_kv = ropes[spec.attention.rope], group_batch.layers[index]
            if gate is not None:
                gate.wait(group, index)
            x, normed = layer(x, normed, next_norm, rope, ops, backend, plan, layer_kv, rows)
        return normed

    def _replay(self, batch: ForwardBatch, x: Tensor, ropes: Ropes) -> Tensor:
        """The layers of a step that replays a window: each on fewer rows than the one before (`model/replay.py`)."""
        ops, backend, num_tokens = self.ops, self.attention_backend, x.shape[0]
        wanted, replay = batch.wanted, ReplayRows(replace(batch, wanted=None), self._replay_leads)
        plans = self._plans(batch)
        x, normed = ops.join(x, None, None, self.layers[0].attention_norm)  # type: ignore[arg-type]
        for number, (layer, next_norm, spec, (group, index)) in enumerate(self._placed()):
            group_batch, plan = plans[group]
            rope, layer_kv = ropes[spec.attention.rope], group_batch.layers[index]
            if batch.gate is not None:
                batch.gate.wait(group, index)
            differs, keep = replay.advance(number + 1)
            x, normed = layer(x, normed, next_norm, rope, ops, backend, plan, layer_kv, None, keep)
            if not len(x):
                break
            if differs:
                ropes = ropes if keep is None else rope_rows(ropes, keep)
                plans = self._plans(replay.batch)
        hidden = replay.whole(normed, num_tokens)
        return hidden if wanted is None else hidden[wanted.rows]

    def _placed(self) -> Iterator[tuple[Any, RmsNorm, LayerSpec, tuple[GroupName, int]]]:
        """Each layer with the norm that is worked out together with its last sum (the next layer's first, or the final
        one), its spec, and where its KV is."""
        norms: list[Any] = [*(layer.attention_norm for layer in self.layers), self.final_norm]
        return zip(self.layers, norms[1:], self.description.layers, self.description.layer_groups, strict=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [rows, vocab_size] in fp32 (fp64 for an fp64 model) for rows of `forward`'s result."""
        logits = self._head(hidden).to(wide_dtype(self.dtype))
        cap = self.description.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def greedy(self, hidden: Tensor) -> Tensor:
        """int64 [rows]: the likeliest next token for rows of `forward`'s result, the first of equals."""
        if self.description.logit_softcap is not None:
            return self.logits(hidden).argmax(dim=-1)
        if self._screened_head is not None and hidden.shape[0] <= MOST_ROWS:
            return self._screened_head.argmax(hidden)
        if self._packed_head is not None and (chosen := self._packed_head.argmax(hidden)) is not None:
            return chosen
        return self.ops.argmax(self._head(hidden))

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._tied is not None:
            return self._tied.rows(token_ids, self.dtype)
        assert self.embedding is not None
        return F.embedding(token_ids, self.embedding).to(self.dtype)

    def _head(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head(hidden)
        if self._tied is not None:
            return self._tied.linear(hidden, None)
        if self._packed_head is not None:
            return self._packed_head.linear(hidden, None)
        assert self.embedding is not None
        return F.linear(hidden, self.embedding)

    def _ropes(self, positions: Tensor) -> Mapping[RopeSpec, tuple[Tensor, Tensor]]:
        dtype = self.ops.rope_dtype(self.dtype)
        return {
            spec: cos_sin(frequencies, positions, dtype, amplitude=spec.amplitude)
            for spec, frequencies in self._frequencies.items()
        }

    def _last_plan(self, batch: ForwardBatch) -> tuple[Tensor, AttentionPlan] | None:
        """The wanted rows, if they are not all, and the plan of the last layer for them."""
        if batch.wanted is None:
            return None
        queries, (name, _) = batch.queries_wanted(), self.description.layer_groups[-1]
        group = queries.full if name == "full" else queries.swa
        assert group is not None
        return batch.wanted.rows, self.attention_backend.plan(self.description.layers[-1].attention, queries, group)

    def _plans(self, batch: ForwardBatch) -> Plans:
        """Per group in use, its part of the batch and the backend's plan for all of its layers."""
        groups: dict[GroupName, tuple[GroupBatch, AttentionPlan]] = {}
        names: tuple[tuple[GroupName, GroupBatch | None], ...] = (("full", batch.full), ("swa", batch.swa))
        for name, group in names:
            spec = next(self.description.group_layers(name), None)
            if spec is None:
                continue
            if group is None:
                raise ValueError(f"the model has {name} layers but the batch has no {name} group")
            groups[name] = (group, self.attention_backend.plan(spec, batch, group))
        return groups
