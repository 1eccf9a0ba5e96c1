"""The weight cache: what is mapped equals what was computed, and no file, disk or neighbour can spoil a start."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import gguf
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cygnet.base.config import check_weight_cache, resolve
from cygnet.base.errors import ConfigError
from cygnet.engine.runtime.setup import load_engine, weight_cache
from cygnet.model import decoder, int8, layers
from cygnet.model import weight_cache as module
from cygnet.model.bounded_folder import BoundedFolder
from cygnet.model.cache_dir import weights_folder
from cygnet.model.checkpoint import Checkpoint
from cygnet.model.gguf_checkpoint import GgufCheckpoint
from cygnet.model.hf_checkpoint import HfCheckpoint
from cygnet.model.loader import build_model
from cygnet.model.source import ModelSource, find_model
from cygnet.model.weight_cache import WeightCache
from model.harness import Harness, Request
from model.test_gguf import gemma3_file
from model.test_gpt_oss import cloned, packed_and_twin, write_folder, write_gpt_oss_gguf
from model.tiny import Tiny

Q8 = gguf.GGMLQuantizationType.Q8_0
TinyModel = Callable[[str], Tiny]
DTYPES = [torch.float32, torch.bfloat16]


def quantised_gguf(tiny_model: TinyModel, path: Path, dtype: torch.dtype) -> Checkpoint:
    return GgufCheckpoint(gemma3_file(path / "m.gguf", Q8), dtype=dtype)


def mxfp4_folder(tiny_model: TinyModel, path: Path, dtype: torch.dtype) -> Checkpoint:
    model = tiny_model("gpt_oss")
    packed, _ = packed_and_twin(model)
    return HfCheckpoint(write_folder(path / "m", model.checkpoint.config, [packed], method="mxfp4"), dtype=dtype)


def mxfp4_gguf(tiny_model: TinyModel, path: Path, dtype: torch.dtype) -> Checkpoint:
    write_gpt_oss_gguf(path / "m.gguf", cloned(tiny_model("gpt_oss")))
    return GgufCheckpoint(path / "m.gguf", dtype=dtype)


def plain_folder(tiny_model: TinyModel, path: Path, dtype: torch.dtype) -> Checkpoint:
    model = tiny_model("llama")
    tensors = {name: tensor for name, tensor, _ in model.checkpoint.tensors()}
    return HfCheckpoint(write_folder(path / "m", model.checkpoint.config, [tensors]), dtype=dtype)


class Sealed:
    """A checkpoint whose tensors nobody may read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config, self.num_bytes = checkpoint.config, checkpoint.num_bytes
        self.identity, self.is_quantised = checkpoint.identity, checkpoint.is_quantised

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        raise AssertionError("these weights were to be taken from the cache")


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(weights_folder(tmp_path / "cache", limit=1 << 30))


@pytest.fixture
def stored(cache: WeightCache) -> Callable[[], list[Path]]:
    return lambda: [path for path, _ in cache._folder.files()]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay as they are: what is packed can't be looked into."""
    for place in (decoder, int8, layers):
        monkeypatch.setattr(place, "can_pack", lambda dtype, device_type: False)


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def weights(checkpoint: Checkpoint, dtype: torch.dtype, cache: WeightCache | None, **options: Any) -> dict[str, bytes]:
    return bits(dict(build_model(checkpoint, dtype=dtype, cache=cache, **options).named_parameters()))


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [quantised_gguf, mxfp4_folder, mxfp4_gguf])
def test_mapped_weights_are_those_computed_bit_by_bit(
    tiny_model: TinyModel, tmp_path: Path, cache: WeightCache, make: Any, dtype: torch.dtype
) -> None:
    """Three times, since a model that wrote to the file would show at the third (norms add an offset in place)."""
    checkpoint = make(tiny_model, tmp_path, dtype)
    plain = weights(checkpoint, dtype, None)
    assert weights(checkpoint, dtype, cache) == plain
    for _ in range(2):
        assert weights(Sealed(checkpoint), dtype, cache) == plain


@pytest.mark.parametrize("rounded", [False, True])
def test_a_mapped_model_computes_the_same(
    tiny_model: TinyModel, tmp_path: Path, cache: WeightCache, rounded: bool
) -> None:
    checkpoint = quantised_gguf(tiny_model, tmp_path, torch.float32)

    def logits(checkpoint: Checkpoint, cache: WeightCache | None) -> Tensor:
        model = build_model(checkpoint, dtype=torch.float32, cache=cache, int8=rounded, pack_tied_head=True)
        return Harness(model).prefill(Request(list(range(40))), 7)

    plain = logits(checkpoint, None)
    assert torch.equal(logits(checkpoint, cache), plain)
    assert torch.equal(logits(Sealed(checkpoint), cache), plain)


def test_what_costs_nothing_is_not_kept(
    tiny_model: TinyModel, tmp_path: Path, cache: WeightCache, stored: Callable[[], list[Path]]
) -> None:
    for checkpoint in (
        plain_folder(tiny_model, tmp_path, torch.bfloat16),
        GgufCheckpoint(gemma3_file(tmp_path / "m.gguf"), dtype=torch.float32),
    ):
        assert not checkpoint.is_quantised
        build_model(checkpoint, dtype=torch.float32, cache=cache)
    assert stored() == []


def test_each_dtype_has_a_file_whatever_is_made_of_it(
    tiny_model: TinyModel, tmp_path: Path, cache: WeightCache, stored: Callable[[], list[Path]]
) -> None:
    path = gemma3_file(tmp_path / "m.gguf", Q8)
    for _ in range(2):
        for dtype in DTYPES:
            for rounded in (False, True):
                build_model(GgufCheckpoint(path, dtype=dtype), dtype=dtype, int8=rounded, cache=cache)
    assert len(stored()) == 2


# -- sources that change ---------------------------------------------------------------------------------------------


def test_a_changed_gguf_file_is_another(tmp_path: Path) -> None:
    path = gemma3_file(tmp_path / "m.gguf", Q8)

    def identity(dtype: torch.dtype = torch.float32) -> str:
        return GgufCheckpoint(path, dtype=dtype).identity

    first = identity()
    assert identity() == first
    assert identity(torch.bfloat16) != first
    info = path.stat()
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    touched = identity()
    assert touched != first
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    assert identity() not in (first, touched), "the same size and time, but other content"


def test_a_changed_folder_is_another(tiny_model: TinyModel, tmp_path: Path) -> None:
    mxfp4_folder(tiny_model, tmp_path, torch.float32)
    folder = tmp_path / "m"
    first = HfCheckpoint(folder).identity
    assert HfCheckpoint(folder).identity == first
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"swiglu_limit": 2.0}))
    second = HfCheckpoint(folder).identity
    os.utime(folder / "part-0.safetensors", ns=(0, 0))
    assert len({first, second, HfCheckpoint(folder).identity}) == 3


@pytest.mark.usefixtures("unpacked")
def test_a_file_replaced_is_read_anew(tmp_path: Path, cache: WeightCache, stored: Callable[[], list[Path]]) -> None:
    seen = []
    for _ in range(2):  # random weights, so another file each time
        checkpoint = GgufCheckpoint(gemma3_file(tmp_path / "m.gguf", Q8), dtype=torch.float32)
        seen.append(weights(checkpoint, torch.float32, cache))
        assert seen[-1] == weights(checkpoint, torch.float32, None)
    assert seen[0] != seen[1]
    assert len(stored()) == 2


# -- files that are no good ------------------------------------------------------------------------------------------

LIKE = {"a": torch.arange(3000, dtype=torch.float32).view(30, 100), "b": torch.ones(7, dtype=torch.int8)}


def flips(size: int) -> list[int]:
    """Bits: of every byte near the beginning and the end, and of a few between."""
    rnd = Random(3)
    return [8 * at + rnd.randrange(8) for at in {*range(300), *rnd.sample(range(size), 300), *range(size - 9, size)}]


def test_any_flipped_bit_is_found(cache: WeightCache, stored: Callable[[], list[Path]]) -> None:
    cache.store("x", LIKE)
    (path,) = stored()
    good = path.read_bytes()
    for bit in flips(len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert cache.load("x", LIKE) is None, f"bit {bit}"
        assert not path.exists()
    path.write_bytes(good)
    assert bits(cache.load("x", LIKE) or {}) == bits(LIKE)


def test_files_cut_off_or_of_another_kind(cache: WeightCache, stored: Callable[[], list[Path]]) -> None:
    cache.store("x", LIKE)
    (path,) = stored()
    good = path.read_bytes()
    header = b"[1, 2]".ljust(4088)
    texts = [b"{}", b"[]", b"{", b'{"__metadata__": {"maker": 1}}', b'{"__metadata__": 3}', b"\xff", header]
    odd = [len(text).to_bytes(8, "little") + text for text in texts]
    cut = [good[:length] for length in (0, 1, 7, 8, 9, 100, 4096, 5000, len(good) - 1)]
    for bad in [*cut, *odd, good + b"\0", b"\xff" * 5000]:
        path.write_bytes(bad)
        assert cache.load("x", LIKE) is None, bad[:50]
        assert not path.exists()


@pytest.mark.parametrize(
    "other",
    [
        {"a": LIKE["a"]},
        {**LIKE, "c": LIKE["b"]},
        {**LIKE, "a": LIKE["a"].view(100, 30)},
        {**LIKE, "b": torch.ones(7, dtype=torch.float32)},
    ],
)
def test_tensors_of_another_model(cache: WeightCache, other: dict[str, Tensor]) -> None:
    cache.store("x", LIKE)
    assert cache.load("x", other) is None


@pytest.mark.usefixtures("unpacked")
def test_a_damaged_file_is_made_anew(
    tmp_path: Path, cache: WeightCache, stored: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = GgufCheckpoint(gemma3_file(tmp_path / "m.gguf", Q8), dtype=torch.float32)
    plain = weights(checkpoint, torch.float32, cache)
    (path,) = stored()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert weights(checkpoint, torch.float32, cache) == plain
    assert "made anew: the checksum differs" in caplog.text
    assert path.read_bytes() == content


def test_another_versions_file_is_made_anew(
    cache: WeightCache,
    stored: Callable[[], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_maker", lambda: "cygnet 0.0.1 abc")
        cache.store("x", LIKE)
        assert cache.load("x", LIKE) is not None
    assert cache.load("x", LIKE) is None
    assert "of another version (cygnet 0.0.1 abc)" in caplog.text
    assert "WARNING" not in caplog.text, "it comes with every new version"
    assert stored() == []
    cache.store("x", LIKE)
    assert cache.load("x", LIKE) is not None


def test_other_tools_can_read_a_file(cache: WeightCache, stored: Callable[[], list[Path]]) -> None:
    cache.store("x", LIKE)
    with safe_open(stored()[0], framework="pt") as file:
        assert bits({name: file.get_tensor(name) for name in file.keys()}) == bits(LIKE)  # noqa: SIM118
        assert file.metadata()["maker"].startswith("cygnet ")


# -- disks and neighbours --------------------------------------------------------------------------------------------


def test_the_bound_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = weights_folder(tmp_path, limit=50_000)
    cache = WeightCache(folder)
    size = 4096 + sum(tensor.nbytes for tensor in LIKE.values())
    for index in range(5):
        cache.store(f"{index}", LIKE)
        os.utime(cache._path(f"{index}"), (index, index))
        assert folder.num_bytes() == min(index + 1, 50_000 // size) * size
    cache.load("2", LIKE)  # which makes it the last one used
    cache.store("5", LIKE)
    assert {index for index in range(6) if cache.load(f"{index}", LIKE) is not None} == {2, 4, 5}
    assert "not kept" not in caplog.text
    cache.store("6", {"a": torch.zeros(20_000)})
    assert caplog.text.count("weights are not kept") == 1
    assert cache.load("2", LIKE) is not None


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("trouble", ["no folder", "full disk", "no room"])
def test_a_start_without_a_cache_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    limit = 1 << 30
    if trouble == "no folder":
        (tmp_path / "weights").write_text("a file is in the way")
    elif trouble == "full disk":

        def fsync(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
    else:
        limit = 100
    checkpoint = GgufCheckpoint(gemma3_file(tmp_path / "m.gguf", Q8), dtype=torch.float32)
    cache = WeightCache(weights_folder(tmp_path, limit=limit))
    assert weights(checkpoint, torch.float32, cache) == weights(checkpoint, torch.float32, None)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warned if "not kept" in text]) == 1
    assert trouble == "no folder" or list((tmp_path / "weights").glob("*")) == []


def test_many_writers_at_once(cache: WeightCache) -> None:
    """Each reader finds nothing or everything, whoever writes."""
    start, wrong = threading.Barrier(4), []

    def work() -> None:
        start.wait()
        for _ in range(20):
            cache.store("x", LIKE)
            kept = cache.load("x", LIKE)
            if kept is not None and bits(kept) != bits(LIKE):
                wrong.append(kept)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.load("x", LIKE) is not None
    assert len(list(cache._folder.path.iterdir())) == 1


def test_what_is_mapped_outlives_its_file(cache: WeightCache) -> None:
    cache.store("x", LIKE)
    kept = cache.load("x", LIKE)
    assert kept is not None
    cache._path("x").unlink()
    kept["a"].add_(1)
    assert torch.equal(kept["a"], LIKE["a"] + 1)


def test_progress_of_writing(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    cache = WeightCache(BoundedFolder(tmp_path, suffix=".x", limit=1 << 30), progress=lambda *what: seen.append(what))
    cache.store("x", LIKE)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == cache._path("x").stat().st_size


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_setting(tmp_path: Path) -> None:
    source = find_model(str(gemma3_file(tmp_path / "m.gguf")), cache_dir=tmp_path)

    def folder(text: str) -> BoundedFolder | None:
        cache = weight_cache(resolve(sets=[f"model.weight_cache={text}"]).config, source, lambda *what: None)
        return cache and cache._folder

    assert folder("off") is None
    assert folder("0") is None
    kept = folder("3GiB")
    assert kept is not None
    assert (kept.path, kept.limit_bytes()) == (tmp_path / "weights", 3 << 30)
    auto = folder("auto")
    assert auto is not None
    assert 0 < auto.limit_bytes() <= 20 << 30
    with pytest.raises(ConfigError, match="write auto, off, or a size"):
        check_weight_cache("on")
    with pytest.raises(ConfigError, match=r"model\.weight_cache = 'many'"):
        resolve(sets=["model.weight_cache=many"])


def test_an_engine_says_where_its_weights_are_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = gemma3_file(tmp_path / "m.gguf", Q8)
    config = resolve(sets=[f"model.model={path}", "kv.memory=8MiB", "engine.num_threads=1"]).config
    caplog.set_level(logging.INFO)
    stages: list[str] = []
    for words in ("weights kept in", "weights mapped from"):
        caplog.clear()
        load_engine(config, report=lambda stage, done, total: stages.append(stage))
        assert words in caplog.text
        assert str(tmp_path / "cache" / "cygnet" / "weights") in caplog.text
    of_weights = [stage for stage in dict.fromkeys(stages) if stage != "compiling kernels"]
    assert of_weights == ["finding the model", "loading weights", "keeping the weights"]
    second = stages[len(stages) - stages[::-1].index("finding the model") :]
    assert "loading weights" in second
    assert "keeping the weights" not in second


@pytest.mark.slow
@pytest.mark.usefixtures("all_threads", "unpacked")
def test_the_real_gemma(gemma_source: ModelSource, cache: WeightCache) -> None:
    def assembled(cache: WeightCache | None) -> dict[str, Tensor]:
        checkpoint = gemma_source.checkpoint(dtype=torch.bfloat16)
        return dict(build_model(checkpoint, dtype=torch.bfloat16, cache=cache).named_parameters())

    computed = assembled(cache)
    mapped = assembled(cache)
    assert list(mapped) == list(computed)
    assert [name for name, tensor in mapped.items() if not torch.equal(tensor, computed[name])] == []
