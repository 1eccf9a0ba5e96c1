"""Fields of a request that are not in its schema: refused, accepted without effect, or unknown.

- A known feature that would change the answer and is not supported is refused, unless the value switches it off.
- What has no influence on the answer is accepted.
- Anything else is accepted and named in the response header `x-ignored-fields`: clients send fields of other
  servers, and failing on them would break them; doing so silently would hide typing errors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from cygnet.base.errors import InvalidRequestError

NO_EFFECT = frozenset(
    {
        "metadata", "moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
        "request_id", "priority",
    }
)  # fmt: skip
"""Bookkeeping of the caller, or hints that this server needs not follow."""

_OFF: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Unsupported features and the values, besides null, that mean "not used"."""

MAX_NAMED = 16


def check_extra(body: Mapping[str, msgspec.Raw], known: Iterable[str]) -> list[str]:
    """Names of the fields of `body` that are ignored, sorted, each fit for a header. Raises `InvalidRequestError` for
    the first one that asks for something unsupported."""
    ignored: list[str] = []
    for name in sorted(body.keys() - set(known)):
        if name in _OFF:
            value = msgspec.json.decode(body[name])
            if value is not None and value not in _OFF[name]:
                raise InvalidRequestError(f"{name} is not supported by this server", param=name, code="unsupported")
        elif name not in NO_EFFECT:
            ignored.append("".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64]))
    return ignored[:MAX_NAMED]
