"""What routing needs of a request's body: model, session, priority, and block keys of its text. The body itself is
never changed.

Keys are chained hashes over the prompt's JSON text, cut in blocks of `block_bytes`:

    key[i] = xxh3(key[i - 1], seed = xxh3(text[i * block_bytes : (i + 1) * block_bytes]))
    key[-1] = xxh3(model, tenant)

The tenant is the caller's key, where keys are to be kept apart, and the body's `cache_salt`, by which engines do.

Beyond `FINE_BLOCKS` blocks a key covers `COARSE` of them, and the blocks in between have the key before it: there a
match may be up to `COARSE - 1` blocks too long, and a prompt of 1M tokens is read in a third of the time.

The text is: tools, system prompt, messages (or `prompt`, or `input`), in this order wherever they stand in the body,
as the caller serialised them. So no tokenizer and no full decoding is needed, and a session whose messages only grow
keeps its keys. A collision costs a wrong route, never a wrong answer, hence a fast hash.
"""

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, repeat
from operator import getitem
from typing import Any

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from cygnet.base.errors import InvalidRequestError
from cygnet.router.body import Body, read_body
from cygnet.router.ladder import MAX_BLOCKS

FINE_BLOCKS = 256
COARSE = 4

_QUOTE = ord('"')

_VOLATILE_SPAN = 4096
"""Characters of a system prompt in which a volatile header is looked for."""


@dataclass(frozen=True, slots=True)
class KeySettings:
    """How text becomes keys. All routers of a fleet must agree."""

    block_bytes: int = 2048
    bytes_per_token: float = 4.0
    volatile_header: "re.Pattern[str] | None" = None
    """What to leave out at the beginning of a system prompt, such as a date."""

    @property
    def block_tokens(self) -> int:
        """Tokens that a block stands for."""
        return max(1, int(self.block_bytes / self.bytes_per_token))


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request before it is placed."""

    model: str
    """Empty: the body names none."""
    chain: bytes
    """Keys of the whole blocks, 8 bytes each."""
    tokens: int
    """Length of the prompt, estimated from its bytes."""
    prefix: bytes
    """Key of the first block, or of all the text when it is shorter."""
    session: bytes
    priority: int


_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode


def read_prompt(body: bytes | bytearray, settings: KeySettings, tenant: bytes = b"", session: bytes = b"") -> Prompt:
    """Read a JSON body; `session` from a header goes before what the body says. O(bytes).

    Raises `InvalidRequestError` when the body is seen not to be a JSON object (see `read_body`).
    """
    try:
        fields = read_body(body)
        model = _text(fields.model)
        if not session and (fields.prompt_cache_key or fields.user):
            session = (_text(fields.prompt_cache_key) or _text(fields.user)).encode()
        priority = _priority(fields.priority) if fields.priority else 0
        if fields.cache_salt:
            tenant += _text(fields.cache_salt).encode()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not a JSON object: {error}") from None
    pieces = _pieces(fields, settings)
    text = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
    seed = _seed(model, tenant)
    chain = chain_keys(text, seed, settings.block_bytes)
    return Prompt(
        model=model,
        chain=chain,
        tokens=int(len(text) / settings.bytes_per_token),
        prefix=chain[:8] or xxh3_64_digest(seed, xxh3_64_intdigest(text)),
        session=session,
        priority=priority,
    )


@lru_cache(maxsize=1024)
def _seed(model: str, tenant: bytes) -> bytes:
    return xxh3_64_digest(b"%d %s %s" % (len(tenant), tenant, model.encode()))


def _text(raw: msgspec.Raw) -> str:
    """A string field; empty when it is absent or no string."""
    value = _decode_any(raw) if raw and memoryview(raw)[0] == _QUOTE else ""
    return value if isinstance(value, str) else ""


def _priority(raw: msgspec.Raw) -> int:
    value = _decode_any(raw) if len(raw) <= 20 else 0
    return max(-1000, min(1000, value)) if isinstance(value, int) else 0


def _pieces(fields: Body, settings: KeySettings) -> list[memoryview]:
    """The prompt's text in the order in which models read it, without the closing bracket of what will grow."""
    pieces = [memoryview(raw) for raw in (fields.tools, fields.instructions, fields.system) if raw]
    grows = fields.messages or fields.prompt or fields.input
    if grows:
        if settings.volatile_header is not None and fields.messages:
            pieces += _without_header(fields.messages, settings.volatile_header)
        else:
            pieces.append(memoryview(grows)[:-1])
    return pieces


def _without_header(messages: msgspec.Raw, header: "re.Pattern[str]") -> list[memoryview]:
    """Messages with what `header` matches at the beginning of a leading system prompt left out."""
    whole = [memoryview(messages)[:-1]]
    try:
        items = _decode_list(messages)
        first = _decode_any(items[0]) if items else None
    except msgspec.DecodeError:
        return whole
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return whole
    content = first.get("content")
    if not isinstance(content, str):
        return whole
    match = header.match(content[:_VOLATILE_SPAN])
    if match is None:
        return whole
    return [memoryview(content[match.end() :].encode()), *(memoryview(item) for item in items[1:])]


@lru_cache(maxsize=8)
def _cuts(block_bytes: int) -> tuple[slice, ...]:
    """Where the text is cut: `FINE_BLOCKS` blocks, then `COARSE` at a time, up to `MAX_BLOCKS`."""
    fine, step = FINE_BLOCKS * block_bytes, COARSE * block_bytes
    cuts = [slice(start, start + block_bytes) for start in range(0, fine, block_bytes)]
    return (*cuts, *(slice(start, start + step) for start in range(fine, MAX_BLOCKS * block_bytes, step)))


def chain_keys(text: memoryview, seed: bytes, block_bytes: int) -> bytes:
    """Keys of the whole blocks of `text`, at most `MAX_BLOCKS`. O(bytes); what is done per block runs in C."""
    num_blocks = min(len(text) // block_bytes, MAX_BLOCKS)
    fine = min(num_blocks, FINE_BLOCKS)
    coarse = (num_blocks - fine) // COARSE
    blocks: Iterator[Any] = map(getitem, repeat(text), islice(_cuts(block_bytes), fine + coarse))
    keys = b"".join(islice(accumulate(map(xxh3_64_intdigest, blocks), xxh3_64_digest, initial=seed), 1, None))
    return _spread(keys, fine, coarse, num_blocks) if num_blocks > FINE_BLOCKS else keys


def _spread(keys: bytes, fine: int, coarse: int, num_blocks: int) -> bytes:
    """One key for each block, from `fine` keys of a block and `coarse` ones of `COARSE` blocks."""
    found, spread = array("Q", keys), array("Q", bytes(8 * num_blocks))
    end = fine + COARSE * coarse
    spread[:fine] = found[:fine]
    for place in range(COARSE - 1):
        spread[fine + place : end : COARSE] = found[fine - 1 : -1]
    spread[fine + COARSE - 1 : end : COARSE] = found[fine:]
    spread[end:] = found[-1:] * (num_blocks - end)
    return spread.tobytes()
