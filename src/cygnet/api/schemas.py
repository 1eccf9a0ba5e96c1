"""Request bodies. A field that is `None` means "not given", as the official client sends it."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Doc = Meta


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that both generation endpoints share. Those after `user` are extensions to OpenAI's API."""

    model: Annotated[str | None, Doc(description="Name of the served model; may be left out.")] = None
    max_tokens: Annotated[int | None, Doc(description="Most tokens to generate.")] = None
    n: Annotated[int | None, Doc(description="Answers per prompt (1 to 128).")] = None
    stream: Annotated[bool | None, Doc(description="Answer as server-sent events.")] = None
    stream_options: StreamOptions | None = None
    stop: Annotated[str | list[str] | None, Doc(description="Up to 16 strings that end the text.")] = None
    temperature: Annotated[float | None, Doc(description="0 is greedy; default 1.")] = None
    top_p: Annotated[float | None, Doc(description="Nucleus sampling, above 0 and at most 1.")] = None
    presence_penalty: Annotated[float | None, Doc(description="-2 to 2.")] = None
    frequency_penalty: Annotated[float | None, Doc(description="-2 to 2.")] = None
    logit_bias: Annotated[dict[str, float] | None, Doc(description="Token id to bias, -100 to 100.")] = None
    seed: Annotated[int | None, Doc(description="Same seed, same text. Answer i of n uses seed + i.")] = None
    user: Annotated[Any, Doc(description="Accepted and ignored.")] = None
    top_k: Annotated[int | None, Doc(description="Keep the k likeliest tokens; 0 or -1: all.")] = None
    min_p: Annotated[float | None, Doc(description="Drop tokens less likely than this times the likeliest.")] = None
    repetition_penalty: Annotated[float | None, Doc(description="0.01 to 100; 1 is off.")] = None
    min_tokens: Annotated[int | None, Doc(description="Don't stop before this many tokens.")] = None
    ignore_eos: Annotated[bool | None, Doc(description="Go on after an end-of-sequence token.")] = None
    stop_token_ids: Annotated[list[int] | None, Doc(description="Token ids that end the text.")] = None
    include_stop_str_in_output: Annotated[bool | None, Doc(description="Keep the stop string in the text.")] = None
    skip_special_tokens: Annotated[bool | None, Doc(description="Leave special tokens out; default true.")] = None
    add_special_tokens: Annotated[
        bool | None, Doc(description="Add BOS and the like to the prompt; default: true for text, false for chat.")
    ] = None
    cache_salt: Annotated[str | None, Doc(description="Share cached prefixes only with the same salt.")] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Continue a text."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Doc(description="A text, token ids, or a list of either."),
    ]
    logprobs: Annotated[int | None, Doc(description="Alternatives reported per token, 0 to 20.")] = None
    echo: Annotated[bool | None, Doc(description="Put the prompt before the text; not with logprobs.")] = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message. Only `text` is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message: `system` (or `developer`, the same here), `user` or `assistant`."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Answer the last message of a conversation."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[
        int | None, Doc(description="Newer name of max_tokens. Default: what the context leaves.")
    ] = None
    logprobs: Annotated[bool | None, Doc(description="Report log probabilities.")] = None
    top_logprobs: Annotated[int | None, Doc(description="Alternatives per token, 0 to 20; needs logprobs.")] = None
    add_generation_prompt: Annotated[bool | None, Doc(description="Open the assistant's turn; default true.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Doc(description="Variables for the template.")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Text (`prompt`) or a conversation (`messages`) to token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool | None, Doc(description="Also return each token's text.")] = None


class CacheQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to tell of the cache."""

    limit: Annotated[int, Doc(description="Most sequences to describe.", ge=1, le=1000)] = 20


class FlushQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to drop besides device and host memory."""

    store: Annotated[bool, Doc(description="All that the store has of this model.")] = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to text."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: Annotated[bool | None, Doc(description="Default false.")] = None
