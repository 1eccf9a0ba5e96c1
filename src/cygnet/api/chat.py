"""`POST /v1/chat/completions`."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from cygnet.api.body import parse
from cygnet.api.endpoint import Choice, Prepared
from cygnet.api.generation import Job
from cygnet.api.output import Delta, TokenLogprobs
from cygnet.api.params import answers, cache_salt, check_model, check_stream, fit, sampling_params, text_options
from cygnet.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from cygnet.api.schemas import ChatMessage, ChatRequest
from cygnet.api.service import Service
from cygnet.api.tokenization import Tokenizer
from cygnet.base.errors import InvalidRequestError
from cygnet.base.sampling import MAX_LOGPROBS

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


async def prepare_chat(service: Service, body: bytes) -> Prepared:
    """Check everything that can be checked before the template runs, then tokenize, then fit into the context."""
    request, ignored = await service.pool.parse(body, lambda: parse(body, ChatRequest))
    check_model(request.model, service.card.id)
    stream = check_stream(request)
    n = answers(request, service.limits)
    asked, max_tokens_field = _max_tokens(request)
    logprobs = _logprobs(request)
    if asked is not None and asked < 1:
        raise InvalidRequestError(f"{max_tokens_field} must be 1 or more, got {asked}", param=max_tokens_field)
    sampling = sampling_params(request, service.limits, max_tokens=asked, logprobs=logprobs)
    options = text_options(request, logprobs=logprobs is not None, continues_text=False)
    ids = await encode_chat(
        service,
        request.messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        template_kwargs=request.chat_template_kwargs,
        add_special_tokens=bool(request.add_special_tokens),
    )
    sampling = fit(sampling, [ids], service.limits, asked=asked, default=None, param="messages")
    starts = await service.pool.run(lambda: service.tokenizer.message_starts(ids))
    job = Job(f"chatcmpl-{uuid.uuid4().hex}", [ids], sampling, options, n, cache_salt(request), starts)
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    renderer = ChatRenderer(job.id, service.card.id, service.tokenizer, options.logprobs, include_usage)
    return Prepared(job, renderer, stream, include_usage, ignored)


def _max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The bound asked for, and the name it was asked by."""
    if request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidRequestError("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
    return request.max_completion_tokens, "max_completion_tokens"


def _logprobs(request: ChatRequest) -> int | None:
    """Alternatives per token; `None` when no log probabilities are wanted."""
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", param="top_logprobs")
    if request.logprobs:
        return top
    if top:
        raise InvalidRequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    return None


async def encode_chat(
    service: Service,
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any] | None,
    add_special_tokens: bool,
) -> list[int]:
    """Token ids of the rendered conversation. Rendering and encoding happen in one of the tokenizer's threads."""
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages", code="empty_messages")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    tokenizer = service.tokenizer
    if not tokenizer.has_chat_template:
        message = f"{service.card.id} has no chat template; use /v1/completions"
        raise InvalidRequestError(message, param="messages", code="no_chat_template")

    def encode() -> list[int]:
        text = tokenizer.render_chat(
            plain, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    ids = await service.pool.run(encode)
    if not ids:
        raise InvalidRequestError("the rendered conversation has no tokens", param="messages", code="empty_messages")
    return ids


def _plain(message: ChatMessage, where: str) -> dict[str, str]:
    """The message as templates expect it: role and one text. OpenAI's `developer` is what templates call `system`."""
    if message.tool_calls or message.function_call:
        field = "tool_calls" if message.tool_calls else "function_call"
        raise InvalidRequestError(f"{where}.{field} is not supported", param=f"{where}.{field}", code="unsupported")
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        text = f"{where}.role must be one of {known}, got {message.role[:64]!r}"
        raise InvalidRequestError(text, param=f"{where}.role", code="unsupported")
    if message.content is None:
        raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content", code="missing_field")
    plain = {"role": role, "content": _text(message, f"{where}.content")}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for i, part in enumerate(message.content or ()):
        if part.type != "text":
            text = f"{where}[{i}]: content of type {part.type[:64]!r} is not supported, only text"
            raise InvalidRequestError(text, param=f"{where}[{i}].type", code="unsupported")
        if part.text is None:
            raise InvalidRequestError(f"{where}[{i}].text is missing", param=f"{where}[{i}].text", code="missing_field")
        texts.append(part.text)
    return "\n".join(texts)


class ChatRenderer:
    """Results as OpenAI's chat completion objects."""

    def __init__(self, job_id: str, model: str, tokenizer: Tokenizer, logprobs: bool, include_usage: bool) -> None:
        self._id = job_id
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._no_usage = None if include_usage else UNSET
        self._created = int(time.time())

    def opening(self, index: int) -> ChatChunk:
        """The role."""
        return self._object([ChatChunkChoice(index, ChatDelta("", "assistant"), None, None, None)])

    def chunk(self, index: int, delta: Delta) -> ChatChunk:
        """One piece of text."""
        content = ChatDelta(delta.text) if delta.text else ChatDelta()
        logprobs = self._format(delta.logprobs) if delta.logprobs else None
        return self._object([ChatChunkChoice(index, content, logprobs, delta.finish_reason, delta.stop_reason)])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """No choice, only usage."""
        return self._object([], usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        """All answers."""
        rendered = [
            ChatChoice(
                i,
                AssistantMessage("assistant", "".join(choice.text)),
                self._format(choice.logprobs),
                choice.finish_reason,
                choice.stop_reason,
            )
            for i, choice in enumerate(choices)
        ]
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=rendered, usage=usage)

    def _object(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage or self._no_usage
        )

    def _format(self, items: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs([self._token(item) for item in items])

    def _token(self, item: TokenLogprobs) -> TokenLogprob:
        text, raw = self._tokenizer.token_text, self._tokenizer.token_bytes
        position = item.position
        return TokenLogprob(
            text(position.token_id),
            position.logprob,
            list(raw(position.token_id)),
            [TopLogprob(text(token_id), logprob, list(raw(token_id))) for token_id, logprob in position.top],
        )
