"""Conversations with an OpenAI-compatible server, streamed."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from cygnet.base.errors import CygnetError


class ServerError(CygnetError):
    """The server can't be reached or refuses; says why and what to do."""


class NoChatTemplateError(ServerError):
    """The model has no chat template: it can only complete text."""


class Turn(msgspec.Struct):
    """Numbers of one answer."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    first_s: float = 0.0
    """From sending to the first piece of text."""
    last_s: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of generation once it has begun; `None` for answers too short to tell."""
        span = self.last_s - self.first_s
        return (self.output_tokens - 1) / span if self.output_tokens > 1 and span > 0 else None


class ChatClient:
    """One server and one of its models."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(timeout_s, connect=10.0)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerError(f"{url!r} is not an address: {error}") from None
        self.model = ""
        self.is_base = False

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def choose_model(self) -> None:
        """Take the server's first model. Raises `ServerError`."""
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(
                f"no server at {self.url} ({error}); start one with `cygnet serve`, or chat without: "
                "cygnet chat --model smollm2-135m-instruct"
            ) from None
        if response.status_code != 200:
            raise refusal(response.status_code, response.content)
        try:
            card = response.json()["data"][0]
            self.model = str(card["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url}/v1/models lists no model; is it an OpenAI-compatible server?") from None
        self.is_base = card.get("kind") == "base"

    def chat(self, messages: list[dict[str, str]], turn: Turn, **options: Any) -> Iterator[str]:
        """Stream the answer to `messages`; `turn` is filled in on the way. Closing the iterator ends the request.

        Raises `NoChatTemplateError`, `ServerError`.
        """
        return self._stream("/v1/chat/completions", {"messages": messages, **options}, turn)

    def complete(self, prompt: str, turn: Turn, **options: Any) -> Iterator[str]:
        """Stream the continuation of `prompt`; otherwise as `chat`."""
        return self._stream("/v1/completions", {"prompt": prompt, **options}, turn)

    def _stream(self, path: str, fields: dict[str, Any], turn: Turn) -> Iterator[str]:
        given = {key: value for key, value in fields.items() if value is not None}
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **given}
        sent = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, response.read())
                for line in response.iter_lines():
                    if not line.startswith("data:") or line.endswith("[DONE]"):
                        continue
                    text = _take(line[5:], turn)
                    if text:
                        turn.last_s = time.perf_counter() - sent
                        turn.first_s = turn.first_s or turn.last_s
                        yield text
        except httpx.HTTPError as error:
            raise ServerError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None


def _take(data: str, turn: Turn) -> str:
    """The text of one event; its numbers go to `turn`."""
    try:
        event = msgspec.json.decode(data)
        if event.get("error"):
            raise ServerError(f"the server gave up: {event['error'].get('message', event['error'])}")
        usage = event.get("usage")
        if usage:
            turn.prompt_tokens, turn.output_tokens = usage["prompt_tokens"], usage.get("completion_tokens") or 0
            turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in event.get("choices") or ():
            turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
            return (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError) as error:
        raise ServerError(f"the server sent an event that is not OpenAI's format: {error}") from None
    return ""


def refusal(status: int, body: bytes) -> ServerError:
    """The server's own words for a response that is not a success."""
    try:
        error = msgspec.json.decode(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        message, code = body[:200].decode(errors="replace"), None
    if code == "no_chat_template":
        return NoChatTemplateError(message)
    if status in (401, 403):
        message += "; give --api-key or set CYGNET_API_KEY"
    return ServerError(f"the server refuses (HTTP {status}): {message}")
