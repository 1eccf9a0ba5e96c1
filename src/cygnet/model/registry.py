"""Model families by the `model_type` of their config.json. Imports no torch."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cygnet.base.errors import ModelLoadError
from cygnet.base.registry import Registry
from cygnet.model.checkpoint import StoredTensor
from cygnet.model.description import ModelDescription


@dataclass(frozen=True)
class Ignored:
    """A checkpoint tensor that this model leaves out on purpose."""

    reason: str


@dataclass(frozen=True)
class Family:
    """How one family's config and tensor names translate into Cygnet's.

    Parameter names are Cygnet's own (see `HybridModel.weight_slots`): `layers.3.attention.q.weight`. A tensor's name is
    translated by cutting one of `prefixes` and then replacing each dot-separated component found in `components`.
    """

    name: str
    describe: Callable[[Mapping[str, Any]], ModelDescription]
    components: Mapping[str, str]
    prefixes: tuple[str, ...] = ("model.",)
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a tensor's name -> why tensors so named are left out."""
    check_weights: Callable[[Mapping[str, Any]], None] = lambda config: None
    """Raises `ModelLoadError` if this config's weights are stored in a way that can't be loaded."""
    unpack: Callable[[Iterator[StoredTensor]], Iterator[StoredTensor]] = lambda tensors: tensors
    """Rewrites the checkpoint's tensors before their names are translated: splits what is stacked, dequantises."""
    quantisations: frozenset[str] = frozenset()
    """`quant_method`s whose tensors `unpack` can read. Checkpoints quantised otherwise are refused."""

    def parameter_name(self, tensor_name: str) -> str | Ignored:
        """Cygnet's name for a checkpoint tensor, or why there is none."""
        for prefix, reason in self.ignored.items():
            if tensor_name.startswith(prefix):
                return Ignored(reason)
        if tensor_name.endswith(".rotary_emb.inv_freq"):
            return Ignored("rotary frequencies are computed")
        for prefix in self.prefixes:
            if tensor_name.startswith(prefix):
                tensor_name = tensor_name.removeprefix(prefix)
                break
        return ".".join(self.components.get(part, part) for part in tensor_name.split("."))


FAMILIES: Registry[Family] = Registry("model family")

DECODER_COMPONENTS: Mapping[str, str] = {
    "embed_tokens": "embedding",
    "norm": "final_norm",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attention",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Names most decoder-only checkpoints share."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family registered for the config's `model_type`. Raises `ModelLoadError` listing the supported ones."""
    _import_families()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelLoadError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES.get(model_type)


def readable_quantisations(config: Mapping[str, Any]) -> frozenset[str]:
    """`quant_method`s that can be loaded for the config's family; none for an unknown one."""
    try:
        return family_of(config).quantisations
    except ModelLoadError:
        return frozenset()


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Read a config.json. Raises `ModelLoadError` for an unknown family or an unusable field."""
    return family_of(config).describe(config)


def _import_families() -> None:
    """Let every file in `families` register itself; later calls find the modules imported."""
    package = importlib.import_module("cygnet.model.families")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
