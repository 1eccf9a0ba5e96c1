"""Hugging Face folders: shards, dtypes, and every way in which a folder can be unusable."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cygnet.base.errors import ModelLoadError
from cygnet.model.hf_checkpoint import HfCheckpoint

CONFIG = {"model_type": "any", "hidden_size": 4}


def tensors() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return {
        "model.a.weight": torch.randn(4, 6, generator=gen),
        "model.b.weight": torch.randn(3, 4, generator=gen).bfloat16(),
        "model.c.weight": torch.randn(5, generator=gen).half(),
        "model.steps": torch.arange(3),
    }


def folder(path: Path, config: dict[str, Any] | None = None, **files: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or CONFIG))
    for name, content in files.items():
        save_file(content, path / f"{name}.safetensors")
    return path


def sharded(path: Path) -> Path:
    first, second = dict(list(tensors().items())[:2]), dict(list(tensors().items())[2:])
    folder(path, **{"model-1": first, "model-2": second})
    where = dict.fromkeys(first, "model-1.safetensors") | dict.fromkeys(second, "model-2.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


@pytest.mark.parametrize("make", [lambda path: folder(path, model=tensors()), sharded])
def test_every_tensor_once_in_its_stored_type(tmp_path: Path, make: Any) -> None:
    checkpoint = HfCheckpoint(make(tmp_path))
    assert checkpoint.config == CONFIG
    found = list(checkpoint.tensors())
    assert sorted(name for name, _, _ in found) == sorted(tensors())
    for name, tensor, num_bytes in found:
        stored = tensors()[name]
        assert num_bytes == stored.nbytes
        assert tensor.dtype == (torch.float32 if stored.dtype == torch.float16 else stored.dtype)
        assert torch.equal(tensor, stored.to(tensor.dtype))
    assert checkpoint.num_bytes == sum(num_bytes for _, _, num_bytes in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floating_point_tensors_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    for name, tensor, _ in HfCheckpoint(folder(tmp_path, model=tensors()), dtype=dtype).tensors():
        stored = tensors()[name]
        assert tensor.dtype == (dtype if stored.is_floating_point() else stored.dtype)
        assert torch.equal(tensor, stored.to(tensor.dtype))


def test_one_file_of_another_name_is_taken(tmp_path: Path) -> None:
    assert HfCheckpoint(folder(tmp_path, weights=tensors())).num_bytes > 0


def test_nested_config_is_handed_through(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {}}
    assert HfCheckpoint(folder(tmp_path, config, model=tensors())).config == config


def test_missing_shard_is_named_with_the_nearest(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lists model-2\.safetensors, which is missing"):
        HfCheckpoint(tmp_path)


def test_tensor_absent_from_its_shard_is_named(tmp_path: Path) -> None:
    folder(sharded(tmp_path), **{"model-2": {"model.steps": torch.arange(3)}})
    with pytest.raises(ModelLoadError, match=r"model\.c\.weight"):
        HfCheckpoint(tmp_path)


def test_index_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    inner = folder(tmp_path / "inner")
    folder(tmp_path, outside=tensors())
    for file_name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.a.weight": file_name}}))
        with pytest.raises(ModelLoadError, match="outside of its folder"):
            HfCheckpoint(inner)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    path = sharded(tmp_path) / "model-1.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"model-1\.safetensors"):
            HfCheckpoint(tmp_path)
    path.write_bytes(whole)
    HfCheckpoint(tmp_path)


@pytest.mark.parametrize("where", ["top", "text_config"])
@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq"])
def test_quantised_checkpoint_names_its_quantisation(tmp_path: Path, method: str, where: str) -> None:
    quantised = {"quantization_config": {"quant_method": method}}
    config = CONFIG | (quantised if where == "top" else {"text_config": quantised})
    with pytest.raises(ModelLoadError, match=rf"{method}.*bf16"):
        HfCheckpoint(folder(tmp_path, config, model=tensors()))


def test_fp8_tensors_without_a_word_in_the_config(tmp_path: Path) -> None:
    stored = tensors() | {"model.q.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}
    with pytest.raises(ModelLoadError, match=r"model\.q\.weight.*F8_E4M3"):
        HfCheckpoint(folder(tmp_path, model=stored))


def test_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        HfCheckpoint(tmp_path)
    folder(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        HfCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
        HfCheckpoint(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="index"):
        HfCheckpoint(folder(tmp_path, one=tensors(), two=tensors()))


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff"])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    folder(tmp_path, model=tensors())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        HfCheckpoint(tmp_path)
