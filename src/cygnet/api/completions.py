"""`POST /v1/completions`."""

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET

from cygnet.api.body import parse
from cygnet.api.endpoint import Choice, Prepared
from cygnet.api.generation import Job
from cygnet.api.output import Delta, TokenLogprobs
from cygnet.api.params import (
    Limits,
    answers,
    cache_salt,
    check_ids,
    check_model,
    check_stream,
    fit,
    sampling_params,
    text_options,
)
from cygnet.api.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from cygnet.api.schemas import CompletionRequest
from cygnet.api.service import Service
from cygnet.api.tokenization import Tokenizer, TokenizerPool
from cygnet.base.errors import InvalidRequestError
from cygnet.base.sampling import MAX_LOGPROBS

DEFAULT_MAX_TOKENS = 16


async def prepare_completion(service: Service, body: bytes) -> Prepared:
    """Check everything that can be checked before tokenizing, then tokenize, then fit into the context."""
    request, ignored = await service.pool.parse(body, lambda: parse(body, CompletionRequest))
    check_model(request.model, service.card.id)
    stream = check_stream(request)
    prompts = split_prompts(request.prompt)
    n = answers(request, service.limits, len(prompts))
    _check_logprobs(request)
    sampling = sampling_params(request, service.limits, max_tokens=request.max_tokens, logprobs=request.logprobs)
    options = text_options(request, logprobs=request.logprobs is not None, continues_text=True)
    special = request.add_special_tokens is not False
    ids = [await _encode(service.pool, prompt, special, service.limits) for prompt in prompts]
    sampling = fit(sampling, ids, service.limits, asked=request.max_tokens, default=DEFAULT_MAX_TOKENS, param="prompt")
    echo: list[str] = []
    if request.echo:
        echo = [await _echo(service.pool, p, options.skip_special_tokens) for p in prompts for _ in range(n)]
    job = Job(f"cmpl-{uuid.uuid4().hex}", ids, sampling, options, n, cache_salt(request))
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    renderer = CompletionRenderer(job.id, service.card.id, service.tokenizer, options.logprobs, echo, include_usage)
    return Prepared(job, renderer, stream, include_usage, ignored)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of one request: a text, token ids, or a list of texts and token id lists. None may be empty."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [[item for item in prompt if isinstance(item, int)]]
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len(prompts) != len(prompt):
            raise InvalidRequestError("prompt mixes token ids with prompts", param="prompt", code="invalid_type")
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt is empty", param="prompt", code="empty_prompt")
    return prompts


def _check_logprobs(request: CompletionRequest) -> None:
    if request.logprobs is None:
        return
    if not 0 <= request.logprobs <= MAX_LOGPROBS:
        message = f"logprobs must be between 0 and {MAX_LOGPROBS}, got {request.logprobs}"
        raise InvalidRequestError(message, param="logprobs")
    if request.echo:
        message = "echo with logprobs is not supported: log probabilities of prompt tokens are not computed"
        raise InvalidRequestError(message, param="logprobs", code="unsupported")


async def _encode(pool: TokenizerPool, prompt: str | list[int], special: bool, limits: Limits) -> list[int]:
    if isinstance(prompt, list):
        return check_ids(prompt, limits, "prompt")
    ids = await pool.encode(prompt, add_special_tokens=special)
    if not ids:
        raise InvalidRequestError("prompt has no tokens", param="prompt", code="empty_prompt")
    return ids


async def _echo(pool: TokenizerPool, prompt: str | list[int], skip_special: bool) -> str:
    return prompt if isinstance(prompt, str) else await pool.decode(prompt, skip_special_tokens=skip_special)


class CompletionRenderer:
    """Results as OpenAI's completion objects. `echo` has the prompt's text per choice, or is empty."""

    def __init__(
        self, job_id: str, model: str, tokenizer: Tokenizer, logprobs: bool, echo: list[str], include_usage: bool
    ) -> None:
        self._id = job_id
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echo = echo
        self._no_usage = None if include_usage else UNSET
        self._created = int(time.time())

    def opening(self, index: int) -> Completion | None:
        """The prompt's text, when it is echoed."""
        if not self._echo:
            return None
        return self._object([CompletionChoice(index, self._echo[index], None, None, None)])

    def chunk(self, index: int, delta: Delta) -> Completion:
        """One piece of text."""
        logprobs = self._format(index, delta.logprobs)
        return self._object([CompletionChoice(index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)])

    def usage_chunk(self, usage: Usage) -> Completion:
        """No choice, only usage."""
        return self._object([], usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        """All answers."""
        rendered = [
            CompletionChoice(
                i,
                "".join([*self._echo[i : i + 1], *choice.text]),
                self._format(i, choice.logprobs),
                choice.finish_reason,
                choice.stop_reason,
            )
            for i, choice in enumerate(choices)
        ]
        return self._object(rendered, usage)

    def _object(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage or self._no_usage
        )

    def _format(self, index: int, items: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        start = len(self._echo[index]) if self._echo else 0
        text = self._tokenizer.token_text
        tops: list[dict[str, float]] = []
        for item in items:
            top = {text(item.position.token_id): item.position.logprob}
            for token_id, logprob in item.position.top:
                top.setdefault(text(token_id), logprob)  # two tokens may look alike; the likelier one comes first
            tops.append(top)
        return CompletionLogprobs(
            text_offset=[start + item.offset for item in items],
            token_logprobs=[item.position.logprob for item in items],
            tokens=[text(item.position.token_id) for item in items],
            top_logprobs=tops,
        )
