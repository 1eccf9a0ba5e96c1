"""From a request's fields to sampling and text options, each value checked and every error named after its field."""

from dataclasses import dataclass

from msgspec import structs

from cygnet.api.output import TextOptions
from cygnet.api.schemas import GenerationRequest
from cygnet.base.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from cygnet.base.sampling import MAX_N, MAX_STOP_STRINGS, SamplingParams

MAX_SEQUENCES = 1024
"""Most sequences (prompts times n) of one request."""
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256


@dataclass(frozen=True)
class Limits:
    """Of the served model."""

    max_model_len: int
    vocab_size: int
    max_sequences: int
    """Most sequences that one request may ask for."""


def check_model(name: str | None, served: str) -> None:
    """A request may leave the name out; another model's name is `ModelNotFoundError`."""
    if name and name != served:
        raise ModelNotFoundError(f"no model named {name!r} here; this server has {served!r}", param="model")


def answers(request: GenerationRequest, limits: Limits, num_prompts: int = 1) -> int:
    """`n`, within bounds."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n must be between 1 and {MAX_N}, got {n}", param="n")
    if n * num_prompts > limits.max_sequences:
        message = (
            f"{num_prompts} prompts with n = {n} make {n * num_prompts} answers; "
            f"this server takes at most {limits.max_sequences}"
        )
        raise InvalidRequestError(message, param="prompt" if num_prompts > n else "n")
    return n


def check_stream(request: GenerationRequest) -> bool:
    """Whether to stream."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options is only allowed with stream = true", param="stream_options")
    return bool(request.stream)


def cache_salt(request: GenerationRequest) -> str:
    """The salt, empty for none."""
    salt = request.cache_salt or ""
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(f"cache_salt is longer than {MAX_SALT_CHARS} characters", param="cache_salt")
    return salt


def text_options(request: GenerationRequest, *, logprobs: bool, continues_text: bool) -> TextOptions:
    """How tokens become text."""
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    stops = tuple(dict.fromkeys(stops))
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are possible", param="stop"
        )
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequestError(f"stop strings must have 1 to {MAX_STOP_CHARS} characters", param="stop")
    return TextOptions(
        stop=stops,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        continues_text=continues_text,
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
    )


def sampling_params(
    request: GenerationRequest, limits: Limits, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Everything but the final `max_tokens`, checked before any prompt is tokenized (see `fit`)."""
    top_k = request.top_k or 0
    given = {
        name: getattr(request, name)
        for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "seed", "min_tokens", "ignore_eos",
        )
    }  # fmt: skip
    sampling = SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        top_k=0 if top_k == -1 else min(top_k, limits.vocab_size),
        logit_bias=_token_biases(request, limits.vocab_size),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        max_tokens=limits.max_model_len if max_tokens is None else max_tokens,
        logprobs=logprobs,
    )
    sampling.validate()
    for token in sampling.stop_token_ids:
        _check_id(token, limits.vocab_size, "stop_token_ids")
    return sampling


def _token_biases(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text, bias in (request.logit_bias or {}).items():
        if not (text.isascii() and text.isdigit() and len(text) < 12):
            raise InvalidRequestError(f"logit_bias: {text!r} is not a token id", param="logit_bias")
        biases[_check_id(int(text), vocab_size, "logit_bias")] = bias
    return biases


def _check_id(token: int, vocab_size: int, param: str) -> int:
    if not 0 <= token < vocab_size:
        raise InvalidRequestError(
            f"{param}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})", param=param
        )
    return token


def check_ids(tokens: list[int], limits: Limits, param: str) -> list[int]:
    """`tokens`, all of which are in the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
        for token in tokens:
            _check_id(token, limits.vocab_size, param)
    return tokens


def fit(
    sampling: SamplingParams,
    prompts: list[list[int]],
    limits: Limits,
    *,
    asked: int | None,
    default: int | None,
    param: str,
) -> SamplingParams:
    """`sampling` with the final `max_tokens`: what was `asked` for, or else `default` (`None`: no bound of its own) as
    far as the longest prompt leaves room. `param` names the prompt's field. Raises `ContextLengthError`, with the
    numbers.
    """
    longest = max(map(len, prompts))
    room = limits.max_model_len - longest
    if room < 1:
        message = (
            f"the prompt has {longest} tokens, which leaves no room for an answer in this model's context of "
            f"{limits.max_model_len} tokens"
        )
        raise ContextLengthError(message, param=param)
    if asked is not None and asked > room:
        message = (
            f"the prompt has {longest} tokens and {asked} were asked for, together {longest + asked}; "
            f"this model's context is {limits.max_model_len} tokens"
        )
        raise ContextLengthError(message, param="max_tokens")
    if asked is None:
        asked = room if default is None else min(default, room)
    fitted = structs.replace(sampling, max_tokens=asked)
    fitted.validate()
    return fitted
