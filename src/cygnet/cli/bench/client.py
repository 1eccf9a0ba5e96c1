"""One request of a benchmark: what is sent, and what is timed of the answer."""

import time
from typing import Any, Literal

import msgspec

from cygnet.base.errors import CygnetError
from cygnet.cli.bench.connection import ConnectionFailed, Connections

Endpoint = Literal["completions", "chat"]
Prompt = list[int] | str | list[dict[str, str]]
"""Token ids or text for completions, messages for chat."""


class BenchError(CygnetError):
    """The benchmark can't run at all: no server, no such model, a key is missing."""


class Result(msgspec.Struct):
    """One request. Times are seconds of the monotonic clock; `error` is empty for a success.

    ttft      first piece of output minus sending
    itl       gaps between pieces of output (a server may put several tokens into one piece)
    latency   last piece of output minus sending
    """

    sent_s: float = 0.0
    ttft: float = 0.0
    itl: list[float] = msgspec.field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""
    error_detail: str = ""
    text: str = ""
    token_ids: list[int] | None = None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first one; `None` for answers of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Stream:
    """Times a streamed answer. `feed` is called from the socket's read callback."""

    def __init__(self) -> None:
        self.result = Result(sent_s=time.perf_counter())
        self.finished = False
        self.refusal = bytearray()
        self._buffer = bytearray()
        self._last = 0.0
        self._texts: list[str] = []
        self._num_pieces = 0

    def feed(self, status: int, data: bytes) -> None:
        """Take the next bytes of a body that belongs to an answer with `status`."""
        if status != 200:
            self.refusal += data[: 4096 - len(self.refusal)]
            return
        now = time.perf_counter()
        self._buffer += data
        if b"\n" not in data:
            return
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._event(bytes(line[5:].strip()), now)

    def end(self) -> None:
        """The body is complete."""
        result = self.result
        result.text = "".join(self._texts)
        if not result.output_tokens:
            result.output_tokens = self._num_pieces  # no usage: a piece is taken for a token
        if not self.finished and not result.error:
            result.error, result.error_detail = "stream cut", "the stream ended without [DONE]"

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            self.result.error, self.result.error_detail = "bad chunk", str(error)
            return
        if chunk.error is not None:
            self.result.error, self.result.error_detail = "error in stream", _message(chunk.error)
        if chunk.usage is not None:
            self._usage(chunk.usage)
        for choice in chunk.choices:
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: float) -> None:
        delta, result = choice.delta, self.result
        text = choice.text or (delta and (delta.content or delta.reasoning_content)) or ""
        if choice.token_ids:
            result.token_ids = (result.token_ids or []) + choice.token_ids
        if not (text or choice.token_ids or (choice.finish_reason and not self._num_pieces)):
            return  # a role announcement, or the closing chunk after the last token
        self._texts.append(text)
        self._num_pieces += 1
        if self._num_pieces == 1:
            result.ttft = now - result.sent_s
        else:
            result.itl.append(now - self._last)
        self._last = now
        result.latency = now - result.sent_s

    def _usage(self, usage: _Usage) -> None:
        self.result.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self.result.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.result.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _message(error: Any) -> str:
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict) and "message" in inner:
            return str(inner["message"])
        return str(error.get("detail", error))
    return str(error)


def error_text(body: bytes) -> str:
    """The message in an error body of OpenAI's format, or the body's beginning."""
    try:
        return _message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").strip()


class Client:
    """A server under load, as one benchmark addresses it."""

    def __init__(
        self, connections: Connections, *, endpoint: Endpoint, temperature: float, ignore_eos: bool, timeout_s: float
    ) -> None:
        self.connections = connections
        self.endpoint: Endpoint = endpoint
        self.model = ""
        self._path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
        self._fields: dict[str, Any] = {
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": temperature,
        }
        if ignore_eos:
            self._fields["ignore_eos"] = True
        self._timeout_s = timeout_s

    async def send(self, prompt: Prompt, max_tokens: int) -> Result:
        """One streamed request. Never raises for what a server does: the result's `error` says what went wrong."""
        key = "messages" if self.endpoint == "chat" else "prompt"
        fields = {"model": self.model, key: prompt, "max_tokens": max_tokens, **self._fields}
        body = msgspec.json.encode(fields)
        stream = Stream()
        try:
            status = await self.connections.request("POST", self._path, body, stream.feed, self._timeout_s)
        except ConnectionFailed as error:
            stream.end()
            stream.result.error, stream.result.error_detail = error.kind, str(error)
            return stream.result
        if status == 200:
            stream.end()
        else:
            stream.result.error, stream.result.error_detail = f"HTTP {status}", error_text(bytes(stream.refusal))
        return stream.result

    async def find_model(self, wanted: str) -> int | None:
        """Choose the model to ask: `wanted`, or the server's first. Returns its longest context if the server tells.

        Raises `BenchError` when the server can't be reached or has no model.
        """
        try:
            status, body = await self.connections.fetch("GET", "/v1/models")
        except ConnectionFailed as error:
            raise BenchError(f"no server to measure ({error}); start one with `cygnet serve`, or give --url") from None
        if status in (401, 403):
            raise BenchError(f"the server wants an API key ({error_text(body)}); give --api-key or CYGNET_API_KEY")
        cards: list[dict[str, Any]] = []
        if status == 200:
            try:
                cards = msgspec.json.decode(body)["data"]
            except (msgspec.DecodeError, KeyError, TypeError):
                cards = []
        names = [str(card.get("id", "")) for card in cards]
        if not wanted and not names:
            raise BenchError(f"the server lists no models (HTTP {status} from /v1/models); give --model")
        self.model = wanted or names[0]
        card = cards[names.index(self.model)] if self.model in names else {}
        longest = card.get("max_model_len")
        return longest if isinstance(longest, int) else None

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's tokens of `text`, or `None` where it does not offer `/tokenize`."""
        body = msgspec.json.encode({"model": self.model, "prompt": text, "add_special_tokens": False})
        try:
            status, answer = await self.connections.fetch("POST", "/tokenize", body)
            return msgspec.json.decode(answer)["tokens"] if status == 200 else None
        except (ConnectionFailed, msgspec.DecodeError, KeyError, TypeError):
            return None
