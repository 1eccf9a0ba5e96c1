"""Response bodies, as OpenAI's API names them. `stop_reason` is an extension: the stop string or token id."""

import msgspec
from msgspec import UNSET, UnsetType

from cygnet.base.cache_report import FlushReport


class CachedTokensDetails(msgspec.Struct):
    """Where the cached tokens were found (not an OpenAI field)."""

    device: int
    host: int
    store: int


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens reused from the prefix cache, of all tiers; `cached_tokens_details`: from which
    ones, where there are tiers below the device."""

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens of one request. With n > 1 a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(msgspec.Struct):
    """One answer, or one piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Completion(msgspec.Struct, kw_only=True):
    """A completion, or one event of a stream of them."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The chosen token at one position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    """A whole answer."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answers to a conversation."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct):
    """A piece of an answer; the first one has the role."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A piece of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelObject(msgspec.Struct, kw_only=True):
    """An entry of the model list."""

    id: str
    object: str = "model"
    created: int
    owned_by: str
    root: str
    max_model_len: int
    kind: str
    """`instruct`, or `base` for a model that continues text and is not trained to chat (not an OpenAI field)."""


class ModelList(msgspec.Struct):
    """The served models."""

    data: list[ModelObject]
    object: str = "list"


class FlushResponse(msgspec.Struct):
    """The cache has been flushed."""

    dropped: FlushReport
    status: str = "ok"


class TokenizeResponse(msgspec.Struct):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """Text of token ids."""

    prompt: str
