"""gpt-oss beyond what all families share (test_oracle.py): published configs, MXFP4, packed checkpoints, GGUF files."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cygnet.base.errors import ModelLoadError
from cygnet.model.decoder import HybridModel
from cygnet.model.description import MoeSpec
from cygnet.model.gguf_checkpoint import GgufCheckpoint
from cygnet.model.hf_checkpoint import HfCheckpoint
from cygnet.model.layers import activation, gated
from cygnet.model.loader import build_model
from cygnet.model.mxfp4 import dequantise
from cygnet.model.registry import FAMILIES, describe
from model.harness import Harness, Request
from model.test_gguf import write_gguf
from model.test_oracle import assert_close, random_tokens
from model.tiny import Tiny

SMALL: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "initial_context_length": 4096,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "eos_token_id": 200_002,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
LARGE = {
    **SMALL,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


# -- config ----------------------------------------------------------------------------------------------------------


def test_published_configs() -> None:
    small, large = describe(SMALL), describe(LARGE)
    assert (small.num_parameters, large.num_parameters) == (20_914_757_184, 116_829_156_672)
    geometry = small.kv_geometry(2)
    assert (geometry.full.token_bytes, geometry.swa.token_bytes, geometry.window) == (24_576, 24_576, 127)
    assert large.kv_geometry(2).full.token_bytes == 36_864
    swa, full = small.layers[0].attention, small.layers[1].attention
    assert (swa.window, full.window) == (127, None)
    assert swa.sinks
    assert full.sinks
    assert swa.rope == full.rope
    mlp = small.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    assert (mlp.num_experts, mlp.top_k, mlp.limit, mlp.up_offset) == (32, 4, 7.0, 1.0)
    assert small.eos_token_ids == (200_002,)


def test_a_config_may_leave_out_the_pattern_and_the_rope_settings() -> None:
    bare = {name: value for name, value in SMALL.items() if name not in ("layer_types", "rope_scaling", "rope_theta")}
    assert describe(bare) == describe(SMALL)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"swiglu_alpha": 1.5}])
def test_another_activation_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(change))):
        describe({**SMALL, **change})


def test_clamped_experts_by_hand() -> None:
    """gate is cut above only, up on both sides; then (up + 1) * gate * sigmoid(1.702 * gate)."""
    gate, up = [9.0, 3.0, -9.0, -2.0, 7.0], [8.0, 2.0, -8.0, 0.5, -1.0]
    cut = [(7.0, 7.0), (3.0, 2.0), (-9.0, -7.0), (-2.0, 0.5), (7.0, -1.0)]
    expected = [(u + 1) * g / (1 + math.exp(-1.702 * g)) for g, u in cut]
    got = gated(torch.tensor(gate + up, dtype=torch.float64), activation("quick_gelu"), limit=7.0, up_offset=1.0)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


# -- MXFP4 -----------------------------------------------------------------------------------------------------------


def e2m1(code: int) -> float:
    """Sign, two bits of exponent with bias 1, one bit of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def every_byte_with(scale: int) -> tuple[Tensor, Tensor]:
    """16 blocks that hold each byte once."""
    return torch.arange(256, dtype=torch.uint8).view(16, 16), torch.full((16,), scale, dtype=torch.uint8)


@pytest.mark.parametrize("scale", [*range(0, 256, 17), 1, 126, 127, 128, 251, 252, 253, 254])
def test_dequantised_by_the_definition(scale: int) -> None:
    got = dequantise(*every_byte_with(scale)).flatten().double().tolist()
    numbers = [e2m1(code) for byte in range(256) for code in (byte & 15, byte >> 4)]
    if scale == 255:
        assert all(math.isnan(value) for value in got)
        return
    largest = float(torch.finfo(torch.bfloat16).max)
    exact = [number * 2.0 ** (scale - 127) for number in numbers]
    assert got == [math.copysign(math.inf, value) if abs(value) > largest else value for value in exact]


def test_dequantised_bit_by_bit_as_transformers_does() -> None:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 10, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    got = dequantise(blocks, scales)
    assert got.shape == theirs.shape == (3, 10, 128)
    assert torch.equal(got.view(torch.int16), theirs.contiguous().view(torch.int16))


# -- checkpoints -----------------------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]


def packed_and_twin(model: Tiny) -> tuple[Tensors, Tensors]:
    """The tiny model with random MXFP4 experts: packed, and as a plain checkpoint of the same values."""
    generator = torch.Generator().manual_seed(9)
    packed, twin = {}, {}
    for name, tensor, _ in model.checkpoint.tensors():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = twin[name] = tensor
            continue
        experts, rows, columns = tensor.transpose(1, 2).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        twin[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return packed, twin


def write_folder(path: Path, config: dict[str, Any], shards: list[Tensors], *, method: str | None = None) -> Path:
    path.mkdir()
    quantised = {"quantization_config": {"quant_method": method}} if method else {}
    (path / "config.json").write_text(json.dumps(config | quantised))
    where = {}
    for index, shard in enumerate(shards):
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, path / f"part-{index}.safetensors")
        where |= dict.fromkeys(shard, f"part-{index}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> HybridModel:
    return build_model(HfCheckpoint(path), dtype=dtype)


@pytest.fixture
def gpt_oss(tiny_model: Callable[[str], Tiny]) -> Tiny:
    return tiny_model("gpt_oss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_checkpoint_is_its_dequantised_twin(gpt_oss: Tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    """Blocks and scales lie in different files, as at a boundary of shards."""
    packed, twin = packed_and_twin(gpt_oss)
    scales = {name: packed.pop(name) for name in list(packed) if name.endswith("_scales")}
    config = gpt_oss.checkpoint.config
    ours = load(write_folder(tmp_path / "packed", config, [packed, scales], method="mxfp4"), dtype)
    plain = load(write_folder(tmp_path / "plain", config, [twin]), dtype)
    compared = list(zip(ours.named_parameters(), plain.named_parameters(), strict=True))
    assert any(name.endswith("gate_up") for (name, _), _ in compared)
    assert [name for (name, a), (_, b) in compared if not torch.equal(a, b)] == []


def test_packed_checkpoint_gives_transformers_logits(gpt_oss: Tiny, tmp_path: Path) -> None:
    packed, _ = packed_and_twin(gpt_oss)
    folder = write_folder(tmp_path / "packed", gpt_oss.checkpoint.config, [packed], method="mxfp4")
    oracle = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    model = load(folder)
    tokens = random_tokens(70, seed=4)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    assert_close(Harness(model).prefill(Request(tokens), 19), expected)


def test_progress_counts_the_stored_bytes(gpt_oss: Tiny, tmp_path: Path) -> None:
    packed, _ = packed_and_twin(gpt_oss)
    checkpoint = HfCheckpoint(write_folder(tmp_path / "f", gpt_oss.checkpoint.config, [packed], method="mxfp4"))
    seen: list[tuple[int, int]] = []
    build_model(checkpoint, dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(("family", "method"), [("gpt_oss", "bitsandbytes"), ("gpt_oss", "fp8"), ("llama", "mxfp4")])
def test_other_quantisations_are_refused(
    tiny_model: Callable[[str], Tiny], tmp_path: Path, family: str, method: str
) -> None:
    model = tiny_model(family)
    tensors = {name: tensor for name, tensor, _ in model.checkpoint.tensors()}
    with pytest.raises(ModelLoadError, match=rf"{method}.*bf16"):
        HfCheckpoint(write_folder(tmp_path / "f", model.checkpoint.config, [tensors], method=method))


def unpacked(tensors: Tensors) -> dict[str, Tensor]:
    def stored() -> Iterator[tuple[str, Tensor, int]]:
        for name, tensor in tensors.items():
            yield name, tensor, tensor.nbytes

    return {name: tensor for name, tensor, _ in FAMILIES.get("gpt_oss").unpack(stored())}


def test_what_does_not_fit_is_named() -> None:
    weight = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = torch.zeros(2, 8, 3, 16, dtype=torch.uint8), torch.zeros(2, 8, 3, dtype=torch.uint8)
    assert len(unpacked({f"{weight}_blocks": blocks, f"{weight}_scales": scales})) == 2
    with pytest.raises(ModelLoadError, match=f"only {weight}_blocks"):
        unpacked({f"{weight}_blocks": blocks})
    with pytest.raises(ModelLoadError, match=rf"{weight}: blocks of shape .*\(2, 8, 2\) don't fit"):
        unpacked({f"{weight}_blocks": blocks, f"{weight}_scales": scales[:, :, :2]})
    with pytest.raises(ModelLoadError, match=rf"{weight} has 2 dimensions, it should have 3"):
        unpacked({weight: torch.zeros(4, 4)})


# -- GGUF ------------------------------------------------------------------------------------------------------------

MXFP4 = gguf.GGMLQuantizationType.MXFP4
GGUF_META: dict[str, object] = {
    "context_length": 512, "embedding_length": 64, "block_count": 6, "feed_forward_length": 32,
    "attention.head_count": 6, "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 12,
    "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "rope.freq_base": 150.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
}  # fmt: skip
GGUF_NAMES = {
    "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output.",
    "model.layers.": "blk.", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.sinks": "attn_sinks.weight", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp",
}  # fmt: skip


def write_gpt_oss_gguf(path: Path, state: Tensors, **more: object) -> Tensors:
    """Write the weights as llama.cpp's converter lays them out, experts in MXFP4; the weights after that rounding."""
    tensors: dict[str, Any] = {}
    rounded = dict(state)
    for name, tensor in state.items():
        layer = name.removeprefix("model.layers.").split(".")[0]
        if "mlp.experts" not in name:
            for theirs, ours in GGUF_NAMES.items():
                name = name.replace(theirs, ours)
            tensors[name] = tensor.numpy()
            continue
        rows = tensor.transpose(1, -1)
        parts = {"down": rows} if "down_proj" in name else {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
        for part, value in parts.items():
            if name.endswith("bias"):
                tensors[f"blk.{layer}.ffn_{part}_exps.bias"] = value.contiguous().numpy()
                continue
            stored = quantize(value.contiguous().numpy(), MXFP4)
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = (stored, MXFP4)
            value.copy_(torch.from_numpy(dequantize(stored, MXFP4)))
        rounded[name] = rows.transpose(1, -1)
    meta = {f"gpt-oss.{key}": value for key, value in (GGUF_META | more).items()}
    write_gguf(path, "gpt-oss", meta, tensors)
    return rounded


def cloned(model: Tiny) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.oracle.state_dict().items()}


def test_gguf_file_gives_transformers_logits(gpt_oss: Tiny, tmp_path: Path) -> None:
    config = copy.deepcopy(gpt_oss.oracle.config)
    # What a GGUF file takes for granted.
    config.swiglu_limit = 7.0
    config.rope_parameters = {**config.rope_parameters, "beta_fast": 32.0}
    oracle = GptOssForCausalLM(config).eval()
    oracle.load_state_dict(write_gpt_oss_gguf(tmp_path / "m.gguf", cloned(gpt_oss)))
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf", dtype=torch.float32)
    assert sum(num_bytes for _, _, num_bytes in checkpoint.tensors()) == checkpoint.num_bytes
    tokens = random_tokens(70, seed=6)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    model = build_model(checkpoint, dtype=torch.float32)
    assert_close(Harness(model).prefill(Request(tokens), 19), expected)


def test_gguf_without_yarn_is_refused(gpt_oss: Tiny, tmp_path: Path) -> None:
    write_gpt_oss_gguf(tmp_path / "m.gguf", cloned(gpt_oss), **{"rope.scaling.type": "linear"})
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*'linear'.*yarn"):
        GgufCheckpoint(tmp_path / "m.gguf")
