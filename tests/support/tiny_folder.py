"""A complete tiny model in Hugging Face layout: random hybrid-SWA weights, byte-level tokenizer, chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from model import tiny

VOCAB = 259
BOS, EOS, END_OF_TURN = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(folder: Path) -> Path:
    """Write the model into `folder`: 6 layers, one of them full, window of 15 earlier keys, context of 1,024."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    tiny.randomise(Gemma3ForCausalLM(config)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "<bos>", "<eos>", "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE})
    )
    return folder
