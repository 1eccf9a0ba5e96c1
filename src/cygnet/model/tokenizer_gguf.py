"""The tokenizer in a GGUF file. Imports neither torch nor transformers.

Two kinds are read: `llama` (SentencePiece BPE with byte fallback: pieces with scores) and `gpt2` (byte-level BPE with
merges, split by one of a few regular expressions).
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tokenizers
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from cygnet.base.errors import ModelLoadError
from cygnet.base.registry import Registry
from cygnet.model.cache_dir import default_cache_dir
from cygnet.model.chat_template import GEMMA_TURNS
from cygnet.model.gguf_file import GgufFile
from cygnet.model.tokenizer import Tokenizer

SPACE = "▁"
"""SentencePiece's mark for a space."""
_CACHE_VERSION = 1
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_gguf_tokenizer(path: str | Path, *, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of the GGUF file at `path`.

    A large SentencePiece vocabulary takes seconds to build; it is kept under `cache_dir`, keyed by its content.
    A cache that can't be written or read is done without. Raises `ModelLoadError` for a kind that is not supported.
    """
    file = GgufFile(path)
    kind = file.require("tokenizer.ggml.model")
    if kind == "llama":
        backend = _cached(file, cache_dir or default_cache_dir())
        add_bos = file.get("tokenizer.ggml.add_bos_token", True)
    elif kind == "gpt2":
        backend = _byte_level_bpe(file)
        add_bos = file.get("tokenizer.ggml.add_bos_token", False)
    else:
        raise ModelLoadError(
            f"GGUF file {file.path}: tokenizer kind {kind!r} is not supported (llama and gpt2 are); "
            "use the model's Hugging Face folder"
        )
    return _wrap(file, backend, bool(add_bos))


def _wrap(file: GgufFile, backend: Backend, add_bos: bool) -> Tokenizer:
    def token_id(key: str) -> int | None:
        return file.get(f"tokenizer.ggml.{key}")

    ends = {end for key in _END_KEYS if (end := token_id(key)) is not None}
    control = set(np.flatnonzero(file.require("tokenizer.ggml.token_type") == TokenType.CONTROL).tolist())
    ends |= {end for name in _TURN_ENDS if (end := backend.token_to_id(name)) in control}
    if backend.token_to_id("<|channel|>") in control:
        # An answer in the Harmony format is several messages: this ends one of them.
        ends.discard(backend.token_to_id("<|end|>"))
    names = {
        name: text
        for name, key in _TEMPLATE_KEYS.items()
        if (number := token_id(f"{key}_token_id")) is not None and (text := backend.id_to_token(number)) is not None
    }
    template = file.get("tokenizer.chat_template")
    if template is None and file.get("general.architecture") in _DEFAULT_TEMPLATES:
        template = _DEFAULT_TEMPLATES[file.get("general.architecture")]
    return Tokenizer(
        backend,
        origin=str(file.path),
        bos_token_id=token_id("bos_token_id"),
        eos_token_ids=ends,
        add_bos=add_bos,
        # The library's own Prepend would also change the names of the user's symbols, which then are not found.
        space_prefix=_has_space_prefix(file),
        template_tokens=names,
        chat_templates={"default": template} if template else None,
    )


_DEFAULT_TEMPLATES = {"gemma3": GEMMA_TURNS}


def _types(file: GgufFile, count: int) -> list[int]:
    types = file.require("tokenizer.ggml.token_type").tolist()
    if len(types) != count:
        raise ModelLoadError(f"GGUF file {file.path} has {count} tokens but {len(types)} token types")
    return types


# -- llama: SentencePiece BPE ----------------------------------------------------------------------------------------


def _sentencepiece_bpe(file: GgufFile) -> Backend:
    """Pieces and scores as a BPE with merges; `tests/model/test_tokenizer.py` compares it with sentencepiece."""
    pieces = file.strings("tokenizer.ggml.tokens")
    types, scores = _types(file, len(pieces)), file.require("tokenizer.ggml.scores").tolist()
    # The converter writes the user's own symbols with plain spaces; in the vocabulary they are normalised text.
    user = [i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED]
    for i in user:
        pieces[i] = pieces[i].replace(" ", SPACE)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    normal = {piece: scores[i] for piece, i in vocab.items() if types[i] == TokenType.NORMAL}
    unknown = next((pieces[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    if (number := file.get("tokenizer.ggml.unknown_token_id")) is not None:
        unknown = pieces[number]
    fallback = TokenType.BYTE in types
    model = BPE(vocab, merges_of(normal), unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    backend = Backend(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if _has_space_prefix(file) else steps)
    _add_special(backend, pieces, types)
    # Normalised: they are found in the text after its spaces have become marks, as SentencePiece finds them.
    backend.add_tokens([AddedToken(pieces[i], normalized=True, special=False) for i in user])
    return backend


def _has_space_prefix(file: GgufFile) -> bool:
    return file.get("tokenizer.ggml.model") == "llama" and bool(file.get("tokenizer.ggml.add_space_prefix", True))


def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: each way to split a piece into two pieces, the best-scored piece first."""
    merges = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        merges += [
            (piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in scores and piece[cut:] in scores
        ]
    return merges


def _add_special(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i, kind in enumerate(types) if kind in special]
    )


def _cached(file: GgufFile, cache_dir: Path) -> Backend:
    path = cache_dir / "tokenizers" / f"{_vocabulary_hash(file)}.json"
    if path.exists():
        with suppress(Exception):  # damaged, or written by another version of the library: build it anew
            return Backend.from_file(str(path))
    backend = _sentencepiece_bpe(file)
    with suppress(OSError):
        _write_atomically(path, backend)
    return backend


def _write_atomically(path: Path, backend: Backend) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(backend.to_str(pretty=False))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _vocabulary_hash(file: GgufFile) -> str:
    """Names everything that `_sentencepiece_bpe` reads, and the version of the code that wrote the result."""
    tokens = file.require("tokenizer.ggml.tokens")
    flags = [file.get(f"tokenizer.ggml.{key}") for key in ("add_space_prefix", "unknown_token_id")]
    digest = hashlib.blake2b(f"{_CACHE_VERSION} {tokenizers.__version__} {flags}".encode(), digest_size=16)
    digest.update(np.fromiter((len(token) for token in tokens), dtype="<u4", count=len(tokens)).tobytes())
    digest.update(b"".join(tokens))
    for key in ("scores", "token_type"):
        digest.update(file.require(f"tokenizer.ggml.{key}").tobytes())
    return digest.hexdigest()


# -- gpt2: byte-level BPE --------------------------------------------------------------------------------------------

Split = Callable[[], pre_tokenizers.PreTokenizer]
BYTE_LEVEL_SPLITS: Registry[Split] = Registry("pre-tokenizer")
"""How text is cut into words before merges apply, by the name in `tokenizer.ggml.pre`."""


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return _byte_level(use_regex=True)


def _digits_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


def _regex_split(pattern: str) -> Split:
    def split() -> pre_tokenizers.PreTokenizer:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([words, _byte_level(use_regex=False)])

    return split


def _words(digits: str) -> str:
    """The pattern that Llama 3 and Qwen 2 share but for the `digits` taken together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_words() -> str:
    """The pattern of the vocabulary o200k: a word begins anew where small letters are followed by a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    large, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    ending = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return (
        rf"{start}{large}*{small}+{ending}|{start}{large}+{small}*{ending}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


for _name in ("gpt-2", "mpt", "olmo", "jais"):
    BYTE_LEVEL_SPLITS.register(_name)(_gpt2_split)
for _name in ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"):
    BYTE_LEVEL_SPLITS.register(_name)(_digits_split)
for _name in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe"):
    BYTE_LEVEL_SPLITS.register(_name)(_regex_split(_words(r"\p{N}{1,3}")))
for _name in ("qwen2", "deepseek-r1-qwen"):
    BYTE_LEVEL_SPLITS.register(_name)(_regex_split(_words(r"\p{N}")))
BYTE_LEVEL_SPLITS.register("gpt-4o")(_regex_split(_cased_words()))
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "gpt-4o"})
"""Vocabularies in which a word that is a token is that token, whether or not the merges would reach it."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Models whose text is brought to Unicode form C."""


def _byte_level_bpe(file: GgufFile) -> Backend:
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in BYTE_LEVEL_SPLITS:
        raise ModelLoadError(
            f"GGUF file {file.path}: pre-tokenizer {pre!r} is not supported (known: {', '.join(BYTE_LEVEL_SPLITS)}); "
            "use the model's Hugging Face folder"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    types = _types(file, len(tokens))
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in file.strings("tokenizer.ggml.merges"))]
    try:
        model = BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # the library's only type
        raise ModelLoadError(f"GGUF file {file.path}: merges don't fit the vocabulary: {error}") from None
    backend = Backend(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = BYTE_LEVEL_SPLITS.get(pre)()
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, tokens, types)
    backend.add_tokens(
        [
            AddedToken(tokens[i], normalized=False, special=False)
            for i, kind in enumerate(types)
            if kind == TokenType.USER_DEFINED
        ]
    )
    return backend
