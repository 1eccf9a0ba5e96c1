"""A tokenizer of bytes and a few words, enough to cut characters and stop strings in two."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cygnet.base.errors import InvalidRequestError

BOS, EOS = 1, 2
FIRST_BYTE = 3
WORDS = ("hello", " world", "END", "Human", ":\n", " swan")
FIRST_WORD = FIRST_BYTE + 256
VOCAB_SIZE = 512


class FakeTokenizer:
    """Ids: 1 BOS, 2 EOS, then the 256 bytes, then `WORDS`; the rest of the vocabulary is empty."""

    vocab_size = VOCAB_SIZE

    def __init__(self, *, chat: bool = True) -> None:
        self.has_chat_template = chat

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        i = 0
        while i < len(text):
            word = next((w for w in WORDS if text.startswith(w, i)), None)
            if word is not None:
                ids.append(FIRST_WORD + WORDS.index(word))
                i += len(word)
            else:
                ids += [FIRST_BYTE + b for b in text[i].encode()]
                i += 1
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def message_starts(self, ids: Sequence[int]) -> list[int]:
        return []

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in (BOS, EOS):
            return b"<bos>" if token_id == BOS else b"<eos>"
        if FIRST_BYTE <= token_id < FIRST_WORD:
            return bytes([token_id - FIRST_BYTE])
        word = token_id - FIRST_WORD
        return WORDS[word].encode() if 0 <= word < len(WORDS) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def stream(self, *, skip_special_tokens: bool = True, continues_text: bool = False) -> "FakeStream":
        return FakeStream(self, skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        for message in messages:
            if message["content"] == "refuse":
                raise InvalidRequestError("the chat template refuses these messages", param="messages")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return text + ("assistant: " if add_generation_prompt else "")


class FakeStream:
    """Incremental UTF-8."""

    def __init__(self, tokenizer: FakeTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = {BOS, EOS} if skip_special_tokens else set()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skip))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
