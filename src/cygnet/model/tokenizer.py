"""Text to tokens and back. Imports neither torch nor transformers, so an API process stays small.

`load_hf_tokenizer` and `load_gguf_tokenizer` (`cygnet.model.tokenizer_hf`, `cygnet.model.tokenizer_gguf`) make one.

Decoding works on bytes: every token stands for fixed bytes, the bytes of a sequence are those of its tokens joined, and
text is what they spell in UTF-8, with U+FFFD for what is not UTF-8. Hence streaming is an incremental UTF-8 decoder: it
agrees with `decode` for every sequence of ids, and each token is looked at once.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from cygnet.base.errors import InvalidRequestError, ModelLoadError
from cygnet.model.chat_template import ChatTemplate

MOST_MESSAGES = 8
"""Starts of messages that `message_starts` gives, counted from the end of the prompt."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A model's tokenizer. Immutable; every method may be called from several threads at once.

    `bos_token_id` is `None` for a model that has none. `eos_token_ids` are all ids that end an answer, an end of turn
    included. `origin` names the source in error messages.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        origin: str,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        space_prefix: bool = False,
        template_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`add_bos` says whether `encode` begins with BOS; `None` leaves it to the backend's post-processor.
        `space_prefix` puts a space before the text, and after each special token in it.

        `template_tokens` are names for the chat template (`bos_token`, ...); `chat_templates` maps `default` and,
        optionally, `tool_use` to Jinja texts.
        """
        backend.no_padding()
        backend.no_truncation()
        self.origin = origin
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self._backend = backend
        self._add_bos = add_bos
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_names = self._name_pattern() if space_prefix else None
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in self._added)])
        self._speller = _Speller(backend, origin)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self._template_tokens = dict(template_tokens or {})
        self._templates = {
            name: ChatTemplate(text, self._template_tokens, origin=origin)
            for name, text in (chat_templates or {}).items()
        }

    # -- encode ------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it become their ids.

        With `add_special_tokens` the ids begin with BOS if the model wants one: one, also when the text spells it out
        itself, as a chat template's output does. Lone surrogates count as U+FFFD.
        """
        with_post = add_special_tokens and self._add_bos is None
        try:
            ids = self._encode(text, with_post)
        except TypeError:  # the backend's word for half of a surrogate pair, which JSON can carry
            if not isinstance(text, str):
                raise
            ids = self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), with_post)
        bos = self.bos_token_id
        if add_special_tokens and self._add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        if with_post and bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]  # the post-processor put one before the text's own
        return ids

    def _encode(self, text: str, with_post: bool) -> list[int]:
        if self._special_names is None:
            return list(self._backend.encode(text, add_special_tokens=with_post).ids)
        ids: list[int] = []
        for i, part in enumerate(self._special_names.split(text)):
            if part:  # odd parts are special tokens
                ids += self._backend.encode(part if i % 2 else f" {part}", add_special_tokens=False).ids
        return ids

    def _name_pattern(self) -> re.Pattern[str]:
        names = sorted((self._added[token_id] for token_id in self._special), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    # -- decode ------------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Ids beyond the vocabulary spell nothing."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; a special token's are its name. Empty beyond the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            name = self._backend.id_to_token(token_id)
            known = b"" if name is None else self._speller.spell(name, added=token_id in self._added)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text for people; parts of a character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def stream(self, *, skip_special_tokens: bool = True, continues_text: bool = False) -> "TextStream":
        """A decoder for tokens that arrive a few at a time.

        Some models (of the Llama 2 kind) write a space before the first word of any text, which decoding drops. Set
        `continues_text` when the tokens go on from other text: such a space is then kept.
        """
        return TextStream(
            self,
            skip=self._special if skip_special_tokens else frozenset(),
            strip=self._speller.strips_first_space and not continues_text,
        )

    # -- chat --------------------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return bool(self._templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, as text for `encode`. Text parts of a message may be given as a list.

        Raises `InvalidRequestError` if the model has no template or the template refuses the messages.
        """
        if not self._templates:
            raise InvalidRequestError(
                f"{self.origin} has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        template = self._templates.get("tool_use") if tools else None
        return (template or self._templates.get("default") or next(iter(self._templates.values()))).render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )

    @cached_property
    def message_token(self) -> int | None:
        """The special token that begins each message of a rendered chat; `None` where there is no such token."""
        if not self._templates:
            return None

        def rendered(num_messages: int) -> list[int]:
            roles = ("user", "assistant", "user")[:num_messages]
            text = self.render_chat([{"role": role, "content": "a"} for role in roles], add_generation_prompt=False)
            return self.encode(text, add_special_tokens=False)

        try:
            one, three = rendered(1), rendered(3)
        except InvalidRequestError:
            return None
        repeated = (t for t in three if t in self._special and three.count(t) - one.count(t) == 2)
        return next(repeated, None)

    def message_starts(self, ids: Sequence[int]) -> list[int]:
        """Where messages begin in a prompt, but for the first one: at most the first and the last few of many."""
        if self.message_token is None:
            return []
        starts = [index for index, token in enumerate(ids) if token == self.message_token][1:]
        return starts[:1] + starts[1:][-MOST_MESSAGES:]

    def with_chat_template(self, text: str) -> "Tokenizer":
        """The same tokenizer with `text` as its only chat template. Raises `ModelLoadError` for invalid Jinja."""
        return Tokenizer(
            self._backend,
            origin=self.origin,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            add_bos=self._add_bos,
            space_prefix=self._special_names is not None,
            template_tokens=self._template_tokens,
            chat_templates={"default": text},
        )


class TextStream:
    """Turns ids into text as they arrive. What `push` and `flush` return joins to what `decode` gives for all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip: frozenset[int], strip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; a character still in parts is held back."""
        spell = self._tokenizer.token_bytes
        data = b"".join([spell(token_id) for token_id in ids if token_id not in self._skip])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held back, as U+FFFD. The stream is then at its end."""
        return self._utf8.decode(b"", final=True)


class _Speller:
    """The bytes a token's name stands for, by the kind of the backend's decoder."""

    def __init__(self, backend: Backend, origin: str) -> None:
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        self.replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        if self.byte_level:
            return
        for step in steps:
            self._add_step(step, origin)
        if not kinds:
            raise ModelLoadError(f"tokenizer of {origin} has no decoder; byte-level and SentencePiece kinds are read")

    def _add_step(self, step: dict[str, Any], origin: str) -> None:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self.replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                self.replacements.append((old, " "))
                self.strips_first_space = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_first_space = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise ModelLoadError(
                    f"tokenizer of {origin} decodes with {json.dumps(step, ensure_ascii=False)}, which is not "
                    "supported; byte-level and SentencePiece kinds are"
                )

    def spell(self, name: str, *, added: bool) -> bytes:
        if self.byte_level:
            # An added token's name is plain text: only the model's own tokens are written in the byte alphabet.
            codes = [] if added else [_BYTE_OF_CHAR.get(char, -1) for char in name]
            return name.encode() if added or -1 in codes else bytes(codes)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            name = name.replace(old, new)
        return name.encode()


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their byte; the other bytes follow in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
