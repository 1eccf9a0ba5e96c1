"""From a checkpoint to a model that is ready to run."""

import torch
from torch import Tensor

from cygnet.base.errors import ModelLoadError
from cygnet.model.attention import select_backend
from cygnet.model.checkpoint import Checkpoint, Progress
from cygnet.model.decoder import HybridModel
from cygnet.model.ops import select_ops
from cygnet.model.registry import Family, Ignored, family_of
from cygnet.model.weight_cache import WeightCache

_LISTED = 8


def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attention_backend: str = "auto",
    step_kernels: str = "auto",
    progress: Progress | None = None,
    pack_tied_head: bool = False,
    int8: bool = False,
    cache: WeightCache | None = None,
) -> HybridModel:
    """Build the checkpoint's model with weights in `dtype` on `device`; each weight is in memory once.

    `weight_dtype`, if given, is that of matrices (not those of experts): bf16 where `dtype` is fp32, for CPUs only.

    `pack_tied_head` makes one exception: a tied head gets a copy in the layout that CPUs read fastest, which is worth
    `vocab_size * hidden_size` elements of memory where decoding speed matters more.

    `int8` rounds matrices (not those of experts) to one byte per weight; CPUs only. With `pack_tied_head` their rounded
    values are kept packed in `dtype` as well, for steps of many tokens.

    `cache` keeps weights whose values have to be computed (dequantised), or has them already.

    Raises `ModelLoadError` for an unsupported config, and, with names, for tensors that are missing, unknown, doubled
    or of a wrong shape. Raises `ConfigError` for an unknown attention backend.
    """
    device = torch.device(device)
    family = family_of(checkpoint.config)
    description = family.describe(checkpoint.config)
    family.check_weights(checkpoint.config)
    backend = select_backend(attention_backend, device)
    ops = select_ops(step_kernels, device, dtype)

    def unfilled() -> HybridModel:
        return HybridModel(
            description,
            dtype=dtype,
            device=device,
            attention_backend=backend,
            ops=ops,
            weight_dtype=weight_dtype,
        )

    def filled() -> HybridModel:
        model = unfilled()
        _fill(model, family, checkpoint, progress)
        return model

    if cache is None or not checkpoint.is_quantised:
        model = filled()
    else:
        identity = f"{checkpoint.identity} {dtype} {weight_dtype or dtype}"
        model = unfilled()
        if _map(model, cache, identity):
            if progress is not None:
                progress(checkpoint.num_bytes, checkpoint.num_bytes)
        else:
            model = filled()
            cache.store(identity, dict(model.named_parameters()))
    model.finish_loading(pack_tied_head=pack_tied_head, int8=int8)
    return model.eval()


@torch.no_grad()
def _map(model: HybridModel, cache: WeightCache, identity: str) -> bool:
    """Give `model` the weights that `cache` has under `identity`; whether there are any."""
    slots = dict(model.named_parameters())
    kept = cache.load(identity, slots)
    if kept is None:
        return False
    for name, slot in slots.items():
        if slot.device.type == "cpu":
            slot.data = kept[name]
        else:
            slot.copy_(kept[name])
    return True


@torch.no_grad()
def _fill(model: HybridModel, family: Family, checkpoint: Checkpoint, progress: Progress | None) -> None:
    """Stream the checkpoint's tensors into the model's weight slots."""
    slots = dict(model.weight_slots())
    missing = dict.fromkeys(slots)
    unknown: list[str] = []
    done = 0
    for tensor_name, tensor, num_bytes in family.unpack(checkpoint.tensors()):
        name = family.parameter_name(tensor_name)
        if name == "lm_head.weight" and model.description.tied_embeddings:
            name = Ignored("the embedding serves as head")
        if isinstance(name, Ignored):
            pass
        elif name not in slots:
            unknown.append(tensor_name)
        elif name not in missing:
            raise ModelLoadError(f"the checkpoint has two tensors for {name}; the second is {tensor_name}")
        else:
            _copy(slots[name], tensor, tensor_name)
            del missing[name]
        done += num_bytes
        if progress is not None:
            progress(done, checkpoint.num_bytes)
    _check_complete(family, list(missing), unknown)


def _copy(slot: Tensor, tensor: Tensor, name: str) -> None:
    # One weight row given to several heads (q/k norms) is the one shape difference allowed.
    spread = slot.dim() == tensor.dim() + 1 and slot.shape[1:] == tensor.shape
    if slot.shape != tensor.shape and not spread:
        raise ModelLoadError(
            f"tensor {name} has shape {tuple(tensor.shape)}, the config implies {tuple(slot.shape)}: "
            "config and weights don't belong together"
        )
    slot.copy_(tensor)


def _check_complete(family: Family, missing: list[str], unknown: list[str]) -> None:
    if any(name.endswith((".weight_scale_inv", ".weight_scale")) for name in unknown):
        raise ModelLoadError(
            "the checkpoint's weights are quantized (it has weight scales); only bf16 and fp32 weights can be loaded"
        )
    problems = []
    if missing:
        problems.append(f"lacks {_listed(missing)}")
    if unknown:
        problems.append(f"has tensors unknown to this family: {_listed(unknown)}")
    if problems:
        raise ModelLoadError(f"the checkpoint does not fit the {family.name} family: it {'; it '.join(problems)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
