"""What a model is, in plain data: enough to build it, to size its KV cache and to plan for it. Imports no torch.

A family's file turns a `config.json` into a `ModelDescription`; everything after that reads only the description.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from cygnet.base.errors import ModelLoadError
from cygnet.base.geometry import GroupGeometry, KVGeometry

GroupName = Literal["full", "swa"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts; `kind` names a rule in `cygnet.model.rope`."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    """`llama3` only, as is the next."""
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    """Context length before the stretching; `llama3` and `yarn`."""
    beta_fast: float = 32.0
    """`yarn` only, as are the next two: turns within the original length from which on a frequency is kept."""
    beta_slow: float = 1.0
    """Turns up to which a frequency is stretched by the whole factor."""
    truncate: bool = True
    """Whether the blend between the two begins and ends at whole dimensions."""
    amplitude: float = 1.0
    """Factor on the cosines and sines of queries and keys."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` dimensions of a head, paired half with half."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.amplitude


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer. K and V may have different head sizes."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    """Factor on query-key products."""
    rope: RopeSpec
    window: int | None = None
    """Earlier keys a query sees, its own not counted; `None` means all: the layer belongs to the full group."""
    sinks: bool = False
    """One learned logit per head that takes part in the softmax denominator only."""
    value_scale: float = 1.0
    """Factor on V, applied before V is written to the cache."""
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def group(self) -> GroupName:
        return "full" if self.window is None else "swa"

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def num_parameters(self, hidden_size: int) -> int:
        qkv_rows = (self.num_heads + self.num_kv_heads) * self.key_dim + self.num_kv_heads * self.value_dim
        count = qkv_rows * hidden_size + hidden_size * self.num_heads * self.value_dim
        count += qkv_rows * self.qkv_bias + hidden_size * self.output_bias
        return count + self.num_heads * self.sinks + 2 * self.key_dim * self.qk_norm


@dataclass(frozen=True)
class DenseMlp:
    """Gated MLP: down(activation(gate(x)) * up(x))."""

    kind: ClassVar[str] = "dense"
    intermediate_size: int
    activation: str
    bias: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        biases = (2 * self.intermediate_size + hidden_size) * self.bias
        return 3 * hidden_size * self.intermediate_size + biases


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of gated MLPs, down(activation(gate(x)) * (up(x) + up_offset)); a token goes to `top_k` of `num_experts`.

    Experts are selected by score plus a learned bias (`selection_bias`), and weighted by the score alone.
    """

    kind: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str
    scoring: Literal["sigmoid", "softmax"]
    selection_bias: bool = False
    norm_topk_prob: bool = True
    """Divide the selected weights by their sum. Softmax scores so become a softmax over the selected logits."""
    routed_scaling: float = 1.0
    router_bias: bool = False
    """A learned bias in the router's logits: unlike `selection_bias`, it moves the weights too."""
    bias: bool = False
    """Biases in the experts' three projections."""
    limit: float | None = None
    """`l`: gate(x) is cut to at most l and up(x) to between -l and l, both before anything else is done to them."""
    up_offset: float = 0.0

    def num_parameters(self, hidden_size: int) -> int:
        expert = 3 * hidden_size * self.intermediate_size
        expert += (2 * self.intermediate_size + hidden_size) * self.bias
        return self.num_experts * (expert + hidden_size + self.selection_bias + self.router_bias)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual, norm, MLP, residual."""

    attention: AttentionSpec
    mlp: DenseMlp | MoeSpec
    sandwich_norms: bool = False
    """Whether the outputs of attention and MLP are normed too, before they join the residual."""


@dataclass(frozen=True)
class ModelDescription:
    """A decoder-only language model with full-attention and sliding-window layers."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_model_len: int
    tied_embeddings: bool
    norm_weight_offset: float = 0.0
    """Added to every stored norm weight (1 for families that store the weight's distance from one)."""
    embedding_scale: float = 1.0
    """Factor on token embeddings, rounded to the weights' dtype before use."""
    logit_softcap: float | None = None
    """`c`: logits become `c * tanh(logits / c)`."""
    eos_token_ids: tuple[int, ...] = ()
    layer_groups: tuple[tuple[GroupName, int], ...] = field(init=False)
    """Per layer: its group, and its index within the group (the index into `GroupBatch.layers`)."""

    def __post_init__(self) -> None:
        counts: dict[GroupName, int] = {"full": 0, "swa": 0}
        placed: list[tuple[GroupName, int]] = []
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            if attention.num_heads % attention.num_kv_heads:
                raise ModelLoadError(
                    f"layer {index}: {attention.num_heads} query heads can't share {attention.num_kv_heads} KV heads"
                )
            placed.append((attention.group, counts[attention.group]))
            counts[attention.group] += 1
        object.__setattr__(self, "layer_groups", tuple(placed))

    def group_layers(self, group: GroupName) -> Iterator[AttentionSpec]:
        """Attention of the group's layers, in order."""
        return (layer.attention for layer in self.layers if layer.attention.group == group)

    @property
    def window(self) -> int:
        """Earlier keys an SWA query sees; 0 for a model without SWA layers."""
        return max((attention.window or 0 for attention in self.group_layers("swa")), default=0)

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones counted once."""
        count = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2) + self.hidden_size
        for layer in self.layers:
            count += layer.attention.num_parameters(self.hidden_size) + layer.mlp.num_parameters(self.hidden_size)
            count += self.hidden_size * (4 if layer.sandwich_norms else 2)
        return count

    def kv_geometry(self, dtype_bytes: int) -> KVGeometry:
        """Shape of the KV cache with elements of `dtype_bytes` bytes.

        Raises `ModelLoadError` when the layers of a group differ in KV shape or window, or no layer is full.
        """
        full, swa = self._group_geometry("full", dtype_bytes), self._group_geometry("swa", dtype_bytes)
        try:
            return KVGeometry(full=full, swa=swa)
        except ValueError as error:
            raise ModelLoadError(f"{self.family}: {error}") from None

    def _group_geometry(self, group: GroupName, dtype_bytes: int) -> GroupGeometry:
        layers = list(self.group_layers(group))
        shapes = {(a.num_kv_heads, a.key_dim, a.value_dim, a.window) for a in layers}
        if len(shapes) > 1:
            listed = ", ".join(str(shape) for shape in sorted(shapes, key=str))
            raise ModelLoadError(
                f"{self.family}: layers of the {group} group share one block table and must agree in "
                f"(KV heads, key dim, value dim, window); found {listed}"
            )
        heads, key_dim, value_dim, window = shapes.pop() if shapes else (0, 0, 0, None)
        return GroupGeometry(
            num_layers=len(layers),
            num_kv_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype_bytes=dtype_bytes,
            window=window,
        )
