"""Public models by name: the part of each one's `config.json` that planning reads, and where it is from.

`published` is the number of weights that the model's page or safetensors index states; `tests/sim/test_model_table.py`
holds the facts against it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cygnet.base.registry import Registry
from cygnet.sim.model_config import facts_from_config
from cygnet.sim.model_facts import ModelFacts

_FP8 = {"quantization_config": {"quant_method": "fp8"}}
_GEMMA_SOURCE = (
    "huggingface/transformers, models/gemma3/convert_gemma3_weights.py, _VARIANTS; weights: Gemma 3 report, table 1"
)
_GEMMA = {"model_type": "gemma3_text", "vocab_size": 262_144}


@dataclass(frozen=True)
class TableEntry:
    """One model of the table."""

    source: str
    published: float
    """Weights, as stated by the source; draft (MTP) layers are not counted unless said."""
    config: Mapping[str, Any]


MODELS: Registry[TableEntry] = Registry("model")


def _add(name: str, source: str, published: float, /, *parts: Mapping[str, Any], **config: Any) -> None:
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(part)
    MODELS.register(name)(TableEntry(source, published, {**merged, **config}))


def model_facts(name: str, *, weight_bytes: float | None = None) -> ModelFacts:
    """The facts of a model of the table; `ConfigError` names the nearest match. `weight_bytes` overrides the
    checkpoint's bytes per weight."""
    entry = MODELS.get(name)
    return facts_from_config(entry.config, name=name, source=entry.source, weight_bytes=weight_bytes)


def all_facts() -> Iterator[ModelFacts]:
    """Every model of the table, by name."""
    return (model_facts(name) for name in MODELS)


# fmt: off
_MIMO = {
    "hidden_size": 4096, "intermediate_size": 16_384, "moe_intermediate_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "swa_num_key_value_heads": 8, "head_dim": 192,
    "v_head_dim": 128, "sliding_window": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "hybrid_layer_pattern": [int(i not in (0, 5, 11, 17, 23, 29, 35, 41, 47)) for i in range(48)],
    "vocab_size": 152_576, "moe_layer_freq": [0] + [1] * 47, **_FP8,
}
_add("mimo-v2-flash", "config.json of XiaomiMiMo/MiMo-V2-Flash; model card: 309B total, 15B active", 309e9, _MIMO,
     model_type="mimo_v2_flash", max_position_embeddings=262_144)
_add("mimo-v2.5", "config.json of MuVeraAI/MiMo-V2.5 (mirror), text model; card: 310B with encoders", 309e9, _MIMO,
     model_type="mimo_v2", max_position_embeddings=1_048_576)
_add("mimo-v2.5-pro", "config.json and weight index of XiaomiMiMo/MiMo-V2.5-Pro: 1,023,244,718,976 with scales and MTP",
     1_023_244_718_976, model_type="mimo_v2", hidden_size=6144, intermediate_size=16_384, moe_intermediate_size=2048,
     num_hidden_layers=70, num_attention_heads=128, num_key_value_heads=8, swa_num_key_value_heads=8, head_dim=192,
     v_head_dim=128, sliding_window=128, n_routed_experts=384, num_experts_per_tok=8, vocab_size=152_576,
     hybrid_layer_pattern=[int(i not in (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)) for i in range(70)],
     moe_layer_freq=[0] + [1] * 69, max_position_embeddings=1_048_576, **_FP8)

_add("gemma-3-270m", _GEMMA_SOURCE, 268_098_176, _GEMMA, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
     num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=32_768)
_add("gemma-3-1b", _GEMMA_SOURCE, 999_885_952, _GEMMA, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
     num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=32_768)
_add("gemma-3-4b", _GEMMA_SOURCE, 3.88e9, _GEMMA, hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34,
     num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=1024, max_position_embeddings=131_072)
_add("gemma-3-12b", _GEMMA_SOURCE, 11.77e9, _GEMMA, hidden_size=3840, intermediate_size=15_360, num_hidden_layers=48,
     num_attention_heads=16, num_key_value_heads=8, head_dim=256, sliding_window=1024, max_position_embeddings=131_072)
_add("gemma-3-27b", _GEMMA_SOURCE, 27.01e9, _GEMMA, hidden_size=5376, intermediate_size=21_504, num_hidden_layers=62,
     num_attention_heads=32, num_key_value_heads=16, head_dim=128, sliding_window=1024, max_position_embeddings=131_072)

_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4, "vocab_size": 201_088,
    "max_position_embeddings": 131_072, "quantization_config": {"quant_method": "mxfp4"},
}
_add("gpt-oss-120b", "transformers GptOssConfig defaults; openai/gpt-oss README: 117B, 5.1B active", 116.83e9, _OSS,
     num_hidden_layers=36, num_local_experts=128)
_add("gpt-oss-20b", "config.json of openai/gpt-oss-20b; openai/gpt-oss README: 21B, 3.6B active", 20.91e9, _OSS,
     num_hidden_layers=24, num_local_experts=32)

_add("mistral-7b-v0.3", "config.json of mistralai/Mistral-7B-v0.3; safetensors: 7,248,023,552", 7_248_023_552,
     model_type="mistral", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
     num_key_value_heads=8, vocab_size=32_768, max_position_embeddings=32_768)

_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072}
_add("llama-3.1-8b", "config.json of meta-llama/Llama-3.1-8B; 8,030,261,248 parameters", 8_030_261_248, _LLAMA,
     hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32)
_add("llama-3.1-70b", "config.json of meta-llama/Llama-3.1-70B; 70,553,706,496 parameters", 70_553_706_496, _LLAMA,
     hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64)
_add("llama-3.1-405b", "config.json of meta-llama/Llama-3.1-405B; model card: 405B", 405e9, _LLAMA,
     hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126, num_attention_heads=128)

_QWEN = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_QWEN_MOE = {**_QWEN, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_add("qwen3-8b", "config.json of Qwen/Qwen3-8B; safetensors: 8,190,735,360", 8_190_735_360, _QWEN, model_type="qwen3",
     hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8)
_add("qwen3-32b", "config.json of Qwen/Qwen3-32B; model card: 32.8B", 32.8e9, _QWEN, model_type="qwen3",
     hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8)
_add("qwen3-30b-a3b", "config.json of Qwen/Qwen3-30B-A3B; model card: 30.5B total, 3.3B active", 30.5e9, _QWEN_MOE,
     hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32)
_add("qwen3-235b-a22b", "config.json of Qwen/Qwen3-235B-A22B; safetensors: 235,093,634,560", 235_093_634_560, _QWEN_MOE,
     hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64)

_MLA = {
    "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, **_FP8,
}
_DEEPSEEK = {**_MLA, "num_attention_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3,
             "vocab_size": 129_280, "max_position_embeddings": 163_840}
_add("deepseek-v3", "transformers DeepseekV3Config defaults; model card: 671B total, 37B active", 671e9, _DEEPSEEK,
     model_type="deepseek_v3")
_add("deepseek-v3.2", "inference config of deepseek-ai/DeepSeek-V3.2-Exp: V3 with an index, 64 heads of 128, top 2048; "
     "the index key is counted in the KV's dtype", 671e9, _DEEPSEEK, model_type="deepseek_v32", index_n_heads=64,
     index_head_dim=128, index_topk=2048)
_add("kimi-k2", "config.json of moonshotai/Kimi-K2-Instruct; safetensors: 1,026,408,235,864 with scales",
     1_026_408_235_864, _MLA, model_type="kimi_k2", num_attention_heads=64, n_routed_experts=384,
     first_k_dense_replace=1, vocab_size=163_840, max_position_embeddings=131_072)

_GLM = {"model_type": "glm4_moe", "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 151_552, "max_position_embeddings": 131_072}
_add("glm-4.5", "config.json of zai-org/GLM-4.5; transformers docs: 355B total, 32B active", 355e9, _GLM,
     hidden_size=5120, intermediate_size=12_288, moe_intermediate_size=1536, num_hidden_layers=92, n_routed_experts=160,
     first_k_dense_replace=3)
_add("glm-4.5-air", "config.json of zai-org/GLM-4.5-Air; transformers docs: 106B total, 12B active", 106e9, _GLM,
     hidden_size=4096, intermediate_size=10_944, moe_intermediate_size=1408, num_hidden_layers=46, n_routed_experts=128,
     first_k_dense_replace=1)

_add("minimax-m2", "transformers MiniMaxM2Config defaults; transformers docs: 230B total, 10B active", 230e9,
     model_type="minimax_m2", hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48,
     num_key_value_heads=8, head_dim=128, num_local_experts=256, num_experts_per_tok=8, vocab_size=200_064,
     max_position_embeddings=196_608, **_FP8)
# fmt: on
