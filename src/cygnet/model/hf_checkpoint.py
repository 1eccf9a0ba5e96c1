"""A checkpoint in a Hugging Face folder: config.json and memory-mapped *.safetensors."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cygnet.base.errors import ModelLoadError
from cygnet.model.checkpoint import StoredTensor
from cygnet.model.registry import readable_quantisations
from cygnet.model.weight_cache import file_identity

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; `ModelLoadError` names the file if it can't be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


class HfCheckpoint:
    """A `Checkpoint` over the folder `path`. `config` is config.json as it stands, a nested `text_config` included.

    Floating-point tensors come out as `dtype`, or as stored if that is `None` (fp16 then becomes fp32, which holds it
    exactly). Raises `ModelLoadError`, naming the file, for missing or truncated files, and for quantised weights other
    than the model's family unpacks, whose packed tensors come out as stored.
    """

    def __init__(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        if dtype not in (None, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype must be None, torch.bfloat16 or torch.float32, not {dtype}")
        self.path = Path(path)
        self._dtype = dtype
        self._config = read_json(self.path / CONFIG_NAME)
        _refuse_quantisation(self._config, self.path / CONFIG_NAME)
        self._shards = _find_shards(self.path)
        self._num_bytes = self._check_shards()

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._config

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return self._num_bytes

    @property
    def identity(self) -> str:
        """The files of weights, config.json's content, and the dtype."""
        files = [file_identity(shard) for shard in self._shards]
        return json.dumps([files, self._config, str(self._dtype)], sort_keys=True)

    @property
    def is_quantised(self) -> bool:
        """Whether the config says so."""
        return bool(_quantisations(self._config))

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield (name, tensor, bytes as stored), shard by shard. A tensor that needs no conversion is a view of the
        mapped file: copy it, don't write to it."""
        for shard, names in self._shards.items():
            with _open(shard) as file:
                for name in names if names is not None else file.keys():
                    stored = file.get_tensor(name)
                    yield name, self._convert(stored), stored.nbytes

    def _convert(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self._dtype is not None:
            return tensor.to(self._dtype)
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    def _check_shards(self) -> int:
        """Read every header: all tensors are there, and none is of a type that only quantised weights have."""
        total = 0
        for shard, names in self._shards.items():
            with _open(shard) as file:
                present = set(file.keys())
                missing = sorted(set(names or ()) - present)
                if missing:
                    raise ModelLoadError(
                        f"{self.path / INDEX_NAME} says that {shard.name} holds {missing[0]!r}, but it does not "
                        f"({len(missing)} tensors missing); fetch the folder again"
                    )
                for name in names if names is not None else present:
                    total += _stored_bytes(file, name, shard)
        return total


def _stored_bytes(file: Any, name: str, shard: Path) -> int:
    view = file.get_slice(name)
    kind, count = view.get_dtype(), 1
    for size in view.get_shape():
        count *= size
    if kind in _FLOATS:
        return count * _FLOATS[kind].itemsize
    if kind.startswith(("F8", "F4", "F6", "U8", "I8", "I32", "U32")) and name.endswith("weight"):
        raise ModelLoadError(
            f"{shard}: tensor {name!r} is stored as {kind}; quantised weights are not supported, "
            "use the model's bf16 or fp32 checkpoint"
        )
    bits = int("".join(c for c in kind.split("_")[0] if c.isdigit()) or 8)
    return count * bits // 8


def _quantisations(config: dict[str, Any]) -> list[Any]:
    """What the config says of how weights are quantised, for the model and for its text model."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    return [found for part in parts if (found := part.get("quantization_config") or part.get("compression_config"))]


def _refuse_quantisation(config: dict[str, Any], path: Path) -> None:
    for quantisation in _quantisations(config):
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        if method not in readable_quantisations(config):
            raise ModelLoadError(
                f"{path} describes weights quantised with {method or 'an unnamed method'}, which can't be loaded; "
                "use the model's bf16 or fp32 checkpoint"
            )


def _find_shards(folder: Path) -> dict[Path, list[str] | None]:
    """Shard files, each with the tensors to take from it (`None`: all)."""
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed_shards(index)
    if (folder / SINGLE_NAME).exists():
        return {folder / SINGLE_NAME: None}
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ModelLoadError(
            f"{folder} has {len(found)} safetensors files and no {INDEX_NAME} that says which tensors they hold; "
            "fetch the folder again"
        )
    others = [p.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for p in sorted(folder.glob(pattern))]
    hint = f" (it has {others[0]}, which is not that format)" if others else ""
    raise ModelLoadError(f"{folder} has no *.safetensors weights{hint}")


def _indexed_shards(index: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} lacks a 'weight_map' of tensors to files")
    shards: dict[Path, list[str] | None] = {}
    root = index.parent.absolute()
    for name, file_name in weight_map.items():
        shard = index.parent / str(file_name)
        if not Path(root, str(file_name)).is_relative_to(root) or ".." in Path(str(file_name)).parts:
            raise ModelLoadError(f"{index} names a file outside of its folder: {file_name!r}")
        names = shards.setdefault(shard, [])
        assert names is not None
        names.append(name)
    for shard in shards:
        if not shard.exists():
            near = get_close_matches(shard.name, [p.name for p in index.parent.glob("*.safetensors")], n=1)
            raise ModelLoadError(
                f"{index} lists {shard.name}, which is missing{f' (nearest: {near[0]})' if near else ''}; "
                "fetch the folder again"
            )
    return shards


def _open(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{shard} is truncated or not a safetensors file: {error}; fetch it again") from None
