"""What planning needs to know of a model: parameters, the KV it caches, the attention it computes.

All KV byte arithmetic is `cygnet.base.geometry`'s; here are only the shapes that go into it. Norms and biases are left
out of the parameter counts (under 0.1 % of every model in the table).
"""

from dataclasses import dataclass, replace
from functools import cached_property

from cygnet.base.geometry import GroupGeometry, KVGeometry


def attended_pairs(start: int, count: int, limit: int | None = None) -> int:
    """Query-key pairs of the queries at positions `start : start + count`, each of which sees itself and what is before
    it, `limit` keys at most. Exact, O(1)."""
    if limit is None or start + count <= limit:
        return count * start + count * (count + 1) // 2
    if start >= limit:
        return count * limit
    below = limit - start
    return attended_pairs(start, below) + (count - below) * limit


@dataclass(frozen=True)
class SparseIndex:
    """An indexer that chooses which keys a full-attention query sees (DeepSeek's sparse attention)."""

    num_heads: int
    dim: int
    """Of an index query head, and of the one index key per token, which is cached beside the KV."""
    top_k: int
    """Keys that a query sees at most."""


@dataclass(frozen=True)
class AttentionFacts:
    """The attention layers of one group, all alike."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads in the cache; 1 for MLA, whose latent all query heads share."""
    key_dim: int
    """Cached elements of a key head; for MLA the latent, the rotary key and the index key."""
    value_dim: int
    """Cached elements of a value head; 0 for MLA."""
    score_dim: int
    """Length of the query-key products of a prefill."""
    mix_dim: int
    """Length of the values that a prefill adds up, per query head."""
    decode_score_dim: int
    """Length of a decode's query-key products: MLA's are with the latent itself."""
    decode_mix_dim: int
    parameters_in: int
    """Weights per layer that make queries, keys and values."""
    parameters_out: int
    """Weights per layer of the output projection."""
    window: int | None = None
    """Earlier keys a query sees; `None` means all."""
    index: SparseIndex | None = None
    shardable: bool = True
    """Whether tensor parallelism splits the cache by heads. MLA's one latent is on every rank."""

    @property
    def limit(self) -> int | None:
        """Keys a query sees at most, its own among them; `None` means all."""
        return self.index.top_k if self.index else None if self.window is None else self.window + 1

    @property
    def parameters(self) -> int:
        """Weights of all layers of the group."""
        return self.num_layers * (self.parameters_in + self.parameters_out)

    def geometry(self, dtype_bytes: int, tp: int = 1) -> GroupGeometry:
        """What one of `tp` ranks caches. Ranks beyond the number of KV heads hold copies."""
        heads = -(-self.num_kv_heads // tp) if self.shardable else self.num_kv_heads
        return GroupGeometry(self.num_layers, heads, self.key_dim, self.value_dim, dtype_bytes, self.window)

    def flops(self, start: int, count: int) -> int:
        """Attention FLOPs of all layers for the queries at `start : start + count`: products of queries with keys and
        sums of values, two per multiplication. Projections are not in it."""
        decode = count == 1
        dims = self.decode_score_dim + self.decode_mix_dim if decode else self.score_dim + self.mix_dim
        flops = 2 * self.num_heads * dims * attended_pairs(start, count, self.limit)
        if self.index is not None:
            flops += 2 * self.index.num_heads * self.index.dim * attended_pairs(start, count)
        return self.num_layers * flops


@dataclass(frozen=True)
class MoeFacts:
    """Mixture-of-experts layers: routed experts, and what every token goes through beside them."""

    num_layers: int
    num_experts: int
    top_k: int
    expert_parameters: int
    """Weights of one routed expert."""
    shared_parameters: int
    """Weights per layer of shared experts and router."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes per weight, by part. A fraction counts scales too: MXFP4 is 4 bits and 8 bits per 32."""

    attention_in: float = 2.0
    attention_out: float = 2.0
    mlp: float = 2.0
    experts: float = 2.0
    embedding: float = 2.0


@dataclass(frozen=True)
class ModelFacts:
    """One model. `source` says where the facts are from."""

    name: str
    source: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    max_model_len: int
    full: AttentionFacts
    swa: AttentionFacts | None
    dense_layers: int
    dense_parameters: int
    """Weights per layer of the MLP of layers without experts."""
    moe: MoeFacts | None
    weight_bytes: WeightBytes

    # ---------------------------------------------------------------- weights

    @property
    def num_layers(self) -> int:
        return self.full.num_layers + (self.swa.num_layers if self.swa else 0)

    @property
    def groups(self) -> tuple[AttentionFacts, ...]:
        """The groups that have layers."""
        return (self.full, self.swa) if self.swa else (self.full,)

    @cached_property
    def num_parameters(self) -> int:
        """All weights, without norms, biases and draft layers."""
        count = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        count += sum(group.parameters for group in self.groups) + self.dense_layers * self.dense_parameters
        if self.moe:
            count += self.moe.num_layers * self.moe.num_experts * self.moe.expert_parameters
            count += self.moe.num_layers * self.moe.shared_parameters
        return count

    @cached_property
    def num_active_parameters(self) -> int:
        """Weights a token is multiplied with; of the embedding only the head."""
        idle = 0
        if self.moe:
            idle = self.moe.num_layers * (self.moe.num_experts - self.moe.top_k) * self.moe.expert_parameters
        return self.num_parameters - idle - (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)

    def always_bytes(self, tp: int = 1) -> float:
        """Bytes of weights on one of `tp` ranks that every step reads: all but the experts and the input embedding."""
        return (self._stored_bytes(embeddings=1)) / tp

    def expert_bytes(self) -> float:
        """Bytes of one routed expert of one layer."""
        return self.moe.expert_parameters * self.weight_bytes.experts if self.moe else 0.0

    def resident_bytes(self, *, tp: int, ep: int) -> float:
        """Bytes of weights on one GPU: attention, dense MLPs and embeddings split by `tp`, experts by `ep`."""
        kept = self._stored_bytes(embeddings=1 if self.tied_embeddings else 2) / tp
        if self.moe:
            kept += self.moe.num_layers * -(-self.moe.num_experts // ep) * self.expert_bytes()
        return kept

    def _stored_bytes(self, *, embeddings: int) -> float:
        w = self.weight_bytes
        stored = embeddings * self.vocab_size * self.hidden_size * w.embedding
        for group in self.groups:
            stored += group.num_layers * group.parameters_in * w.attention_in
            stored += group.num_layers * group.parameters_out * w.attention_out
        stored += self.dense_layers * self.dense_parameters * w.mlp
        return stored + (self.moe.num_layers * self.moe.shared_parameters * w.mlp if self.moe else 0.0)

    # --------------------------------------------------------------- attention

    def kv_geometry(self, dtype_bytes: int = 2, tp: int = 1) -> KVGeometry:
        """Shape of the KV that one of `tp` ranks holds, with elements of `dtype_bytes` bytes."""
        swa = self.swa.geometry(dtype_bytes, tp) if self.swa else GroupGeometry(0, 0, 0, 0, dtype_bytes)
        return KVGeometry(full=self.full.geometry(dtype_bytes, tp), swa=swa)

    def attention_flops(self, start: int, count: int) -> int:
        """Attention FLOPs of the queries at `start : start + count`, without projections."""
        return sum(group.flops(start, count) for group in self.groups)

    def full_attention_flops(self, start: int, count: int) -> int:
        """The same if every layer saw all earlier keys."""
        return sum(replace(group, window=None, index=None).flops(start, count) for group in self.groups)
