"""Paged attention out of plain PyTorch products, made for CPUs but correct on any device. The default backend.

Keys and values are gathered, head by head, into scratch memory, a bounded number at a time, and only from slots that a
query may read. The query heads that share a KV head are folded into the rows of one matrix, query after query:

    SWA chunk     a band: each tile of queries meets its own keys and one window before them, whatever the prefix is

                      keys   |<- window ->|<- tile ->|
                      query 0 \\___________\\              two triangles of the band's corners are masked
                      query n            \\___________\\

    full chunk    the prefix in key tiles, unmasked, then the chunk's own keys, causally; results are merged by their
                  log-sum-exp
    decodes       requests of similar length together, short ones padded with their own (live) newest slot
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from cygnet.model.attention.backend import ATTENTION_BACKENDS
from cygnet.model.attention.step_plan import ChunkPlan, DecodePlan, StepPlan, plan_step
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV, write_kv
from cygnet.model.description import AttentionSpec

QUERY_TILE = 128
"""Queries of a chunk handled at once."""
KEY_TILE = 2048
"""Prefix keys of a full layer handled at once."""


class Scratch:
    """Memory for gathered keys and values, kept between calls: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def gather(self, name: str, cache: Tensor, index: Tensor) -> Tensor:
        """Rows `index` [n] of `cache` [num_blocks, block_size, num_kv_heads, dim] seen as rows of `dim`: [n, dim].

        The result is valid until the next gather with the same name.
        """
        rows = cache.view(-1, cache.shape[-1])
        size = index.numel() * rows.shape[1]
        where = (name, cache.dtype, cache.device)
        buffer = self._buffers.get(where)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[where] = cache.new_empty(size)
        return torch.index_select(rows, 0, index, out=buffer[:size].view(-1, rows.shape[1]))


@ATTENTION_BACKENDS.register("torch")
class TorchBackend:
    """Scores and sums in fp32 (fp64 for fp64); one step at a time, since scratch memory is shared."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def plan(self, spec: AttentionSpec, batch: ForwardBatch, group: GroupBatch) -> StepPlan:
        return plan_step(spec, batch, group)

    def attend(
        self,
        spec: AttentionSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: StepPlan,
        layer_kv: LayerKV,
    ) -> Tensor:
        write_kv(layer_kv, plan.slot_mapping, key, value)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        for decode in plan.decodes:
            out[decode.rows] = self._decode(spec, query[decode.rows] * spec.scale, sinks, decode, layer_kv)
        self.attend_chunks(spec, query, sinks, plan.chunks, layer_kv, out)
        return out

    def attend_chunks(
        self,
        spec: AttentionSpec,
        query: Tensor,
        sinks: Tensor | None,
        chunks: Iterable[ChunkPlan],
        layer_kv: LayerKV,
        out: Tensor,
    ) -> None:
        """The chunks' rows of `query` [num_tokens, num_heads, key_dim] into those of `out`; their KV is written."""
        attend_chunk = self._full_chunk if spec.window is None else self._band_chunk
        for chunk in chunks:
            rows = slice(chunk.start_row, chunk.end_row)
            attend_chunk(spec, query[rows] * spec.scale, sinks, chunk, layer_kv, out[rows])

    def _gather(self, layer_kv: LayerKV, index: Tensor, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K [*shape, key_dim] and V [*shape, value_dim] of the head rows `index`."""
        index = index.reshape(-1)
        keys = self._scratch.gather("key", layer_kv.key, index).to(dtype)
        values = self._scratch.gather("value", layer_kv.value, index).to(dtype)
        return keys.view(*shape, keys.shape[-1]), values.view(*shape, values.shape[-1])

    def _decode(
        self, spec: AttentionSpec, query: Tensor, sinks: Tensor | None, plan: DecodePlan, layer_kv: LayerKV
    ) -> Tensor:
        """One query per request: `query` [requests, num_heads, key_dim] -> [requests, num_heads, value_dim]."""
        requests, kv_heads, group = query.shape[0], spec.num_kv_heads, spec.group_size
        keys, values = self._gather(layer_kv, plan.index, requests * kv_heads, plan.num_keys, dtype=query.dtype)
        folded = query.reshape(requests * kv_heads, group, spec.key_dim)
        scores = torch.bmm(folded, keys.transpose(1, 2))
        if plan.mask is not None:
            scores.view(requests, -1, plan.num_keys).add_(plan.mask)
        sink_rows = None if sinks is None else sinks.view(kv_heads, group).repeat(requests, 1)
        return _softmax_times_values(scores, values, sink_rows).view(requests, spec.num_heads, spec.value_dim)

    def _band_chunk(
        self,
        spec: AttentionSpec,
        query: Tensor,
        sinks: Tensor | None,
        plan: ChunkPlan,
        layer_kv: LayerKV,
        out: Tensor,
    ) -> None:
        """SWA layer: `query` [n, num_heads, key_dim] into `out` [n, num_heads, value_dim], tile by tile."""
        assert spec.window is not None
        keys, values = self._gather(layer_kv, plan.index, spec.num_kv_heads, plan.num_keys, dtype=query.dtype)
        folded = _fold(query, spec.num_kv_heads)
        group = spec.group_size
        for start in range(0, plan.num_queries, QUERY_TILE):
            end = min(start + QUERY_TILE, plan.num_queries)
            first, last = plan.num_cached + start, plan.num_cached + end
            low = max(0, first - spec.window)
            scores = torch.bmm(folded[:, start * group : end * group], keys[:, low:last].transpose(1, 2))
            _mask_future(scores, end - start)
            _mask_past(scores, end - start, spec.window - (first - low))
            sink_rows = _sink_rows(sinks, spec, end - start)
            tile = _softmax_times_values(scores, values[:, low:last], sink_rows)
            _unfold(tile, out[start:end])

    def _full_chunk(
        self,
        spec: AttentionSpec,
        query: Tensor,
        sinks: Tensor | None,
        plan: ChunkPlan,
        layer_kv: LayerKV,
        out: Tensor,
    ) -> None:
        """Full layer: the prefix tile by tile, then the chunk itself; memory does not grow with the prefix."""
        kv_heads, group = spec.num_kv_heads, spec.group_size
        folded = _fold(query, kv_heads)
        merged = _Merger(folded.shape[1], kv_heads, spec.value_dim, folded)
        for low in range(0, plan.num_cached, KEY_TILE):
            high = min(low + KEY_TILE, plan.num_cached)
            keys, values = self._gather(layer_kv, plan.index[:, low:high], kv_heads, high - low, dtype=query.dtype)
            for rows in _tiles(plan.num_queries, group):
                scores = torch.bmm(folded[:, rows], keys.transpose(1, 2))
                merged.add(rows, *_partial(scores, values))
        own = plan.index[:, plan.num_cached :]
        keys, values = self._gather(layer_kv, own, kv_heads, plan.num_queries, dtype=query.dtype)
        for rows in _tiles(plan.num_queries, group):
            start, end = rows.start // group, rows.stop // group
            scores = torch.bmm(folded[:, rows], keys[:, :end].transpose(1, 2))
            _mask_future(scores, end - start)
            merged.add(rows, *_partial(scores, values[:, :end]))
            _unfold(merged.result(rows, _sink_rows(sinks, spec, end - start)), out[start:end])


class _Merger:
    """Attention of the same queries over disjoint sets of keys, added up by log-sum-exp in fp32 (fp64)."""

    def __init__(self, num_rows: int, kv_heads: int, value_dim: int, like: Tensor) -> None:
        dtype = _wide(like)
        self._out = like.new_zeros(kv_heads, num_rows, value_dim, dtype=dtype)
        self._lse = like.new_full((kv_heads, num_rows, 1), float("-inf"), dtype=dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """`out` [kv_heads, rows, value_dim] normalised over its keys, `lse` [kv_heads, rows, 1] of its scores."""
        before = self._lse[:, rows]
        total = torch.logaddexp(before, lse)
        kept = self._out[:, rows].mul_((before - total).exp_())
        kept.addcmul_(out.to(kept.dtype), (lse - total).exp_())
        before.copy_(total)

    def result(self, rows: slice, sink_rows: Tensor | None) -> Tensor:
        """[kv_heads, rows, value_dim]"""
        out = self._out[:, rows]
        return out if sink_rows is None else out * _sink_factor(self._lse[:, rows], sink_rows)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _tiles(num_queries: int, group: int) -> list[slice]:
    """Rows of folded queries, `QUERY_TILE` queries at a time."""
    return [
        slice(start * group, min(start + QUERY_TILE, num_queries) * group)
        for start in range(0, num_queries, QUERY_TILE)
    ]


def _fold(query: Tensor, kv_heads: int) -> Tensor:
    """[n, num_heads, dim] -> [kv_heads, n * group, dim]: the heads of a query side by side."""
    n, heads, dim = query.shape
    return query.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def _unfold(folded: Tensor, out: Tensor) -> None:
    """[kv_heads, n * group, dim] into `out` [n, num_heads, dim]."""
    n, heads, dim = out.shape
    kv_heads = folded.shape[0]
    out.view(n, kv_heads, heads // kv_heads, dim).copy_(folded.view(kv_heads, n, -1, dim).transpose(0, 1))


def _sink_rows(sinks: Tensor | None, spec: AttentionSpec, num_queries: int) -> Tensor | None:
    """Sinks [num_heads] as one logit per folded row, [kv_heads, num_queries * group]."""
    return None if sinks is None else sinks.view(spec.num_kv_heads, spec.group_size).repeat(1, num_queries)


def _mask_future(scores: Tensor, num_queries: int) -> None:
    """Hide from each query the keys after its own; the tile's own keys are the last `num_queries` columns."""
    corner = scores.unflatten(1, (num_queries, -1))[..., -num_queries:]
    mask = scores.new_full((num_queries, num_queries), float("-inf")).triu_(1)
    corner.add_(mask.unsqueeze(1))


def _mask_past(scores: Tensor, num_queries: int, clipped: int) -> None:
    """Hide keys before the window. Column 0 is `clipped` keys after the first query's oldest visible key."""
    if clipped >= num_queries - 1:
        return
    corner = scores.unflatten(1, (num_queries, -1))[..., :num_queries]
    mask = scores.new_full((num_queries, num_queries), float("-inf")).tril_(-1 - clipped)
    corner.add_(mask.unsqueeze(1))


def _partial(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over these keys alone times values, and the log-sum-exp [.., rows, 1] of the scores."""
    probabilities = torch.softmax(scores, -1, dtype=_wide(scores))
    # The largest score s has probability exp(s - lse): two maxima instead of another pass of exponentials.
    lse = scores.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log_()
    return torch.bmm(probabilities.to(values.dtype), values), lse


def _softmax_times_values(scores: Tensor, values: Tensor, sink_rows: Tensor | None) -> Tensor:
    """[batch, rows, keys] and [batch, keys, dim] -> [batch, rows, dim], with a sink per row in the denominator."""
    if sink_rows is None:
        return torch.bmm(torch.softmax(scores, -1), values)
    out, lse = _partial(scores, values)
    return out * _sink_factor(lse, sink_rows).to(out.dtype)


def _sink_factor(lse: Tensor, sink_rows: Tensor) -> Tensor:
    """What a sink leaves of the other keys' weight: exp(lse) / (exp(lse) + exp(sink))."""
    return torch.sigmoid(lse - sink_rows.unsqueeze(-1))
