"""Block keys and what else routing reads from a body."""

import json
import re
from typing import Any

import pytest

from cygnet.base.errors import ConfigError, InvalidRequestError
from cygnet.router.config import RouterConfig, parse_worker, resolve
from cygnet.router.ladder import MAX_BLOCKS
from cygnet.router.prompt import COARSE, FINE_BLOCKS, KeySettings, Prompt, chain_keys, read_prompt

SETTINGS = KeySettings(block_bytes=64)


def read(body: Any, settings: KeySettings = SETTINGS, **more: bytes) -> Prompt:
    return read_prompt(body if isinstance(body, bytes) else json.dumps(body).encode(), settings, **more)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **fields}


def common(a: Prompt, b: Prompt) -> int:
    blocks = [a.chain[i : i + 8] == b.chain[i : i + 8] for i in range(0, min(len(a.chain), len(b.chain)), 8)]
    return blocks.index(False) if False in blocks else len(blocks)


def test_a_session_that_grows_keeps_its_keys() -> None:
    first = read(chat("a" * 1000))
    second = read(chat("a" * 1000, "b" * 500, "c" * 500))
    assert len(first.chain) == 8 * (first.tokens * 4 // 64)
    assert common(first, second) == len(first.chain) // 8
    assert len(second.chain) > len(first.chain)


def test_other_fields_and_their_order_do_not_matter() -> None:
    plain = read(chat("x" * 500))
    shuffled = read({"temperature": 0.5, "max_tokens": 7, **dict(reversed(chat("x" * 500).items())), "stream": True})
    assert shuffled == plain


@pytest.mark.parametrize(
    "other",
    [
        chat("y" + "x" * 499),
        {**chat("x" * 500), "model": "n"},
        chat("x" * 500, tools=[{"type": "function", "function": {"name": "f"}}]),
        chat("x" * 500, system="be brief"),
    ],
)
def test_what_changes_the_prompt_changes_all_keys(other: dict[str, Any]) -> None:
    assert common(read(chat("x" * 500)), read(other)) == 0
    assert read(chat("x" * 500)).prefix != read(other).prefix


def test_tenants_share_nothing() -> None:
    body = chat("x" * 500)
    assert common(read(body, tenant=b"one"), read(body, tenant=b"two")) == 0
    assert common(read({**body, "model": "b"}, tenant=b"a "), read({**body, "model": " b"}, tenant=b"a")) == 0


def test_tools_come_before_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 200}}]
    assert common(read(chat("a" * 300, tools=tools)), read(chat("b" * 300, tools=tools))) >= 3


@pytest.mark.parametrize(
    "field", [{"prompt": "p" * 400}, {"prompt": list(range(200))}, {"input": "i" * 400}, {"input": [["a" * 400]]}]
)
def test_other_endpoints(field: dict[str, Any]) -> None:
    prompt = read({"model": "m", **field})
    assert len(prompt.chain) >= 8 * 6
    assert prompt.model == "m"


def test_a_short_prompt_has_a_prefix_all_the_same() -> None:
    one, two = read(chat("hi")), read(chat("ho"))
    assert one.chain == two.chain == b""
    assert one.prefix != two.prefix
    assert read(chat("hi")).prefix == one.prefix


def test_volatile_header_is_ignored() -> None:
    settings = KeySettings(block_bytes=64, volatile_header=re.compile(r"Today is [0-9-]+\.\s*"))

    def body(day: str, role: str = "system") -> dict[str, Any]:
        head = {"role": role, "content": f"Today is {day}. " + "rules " * 100}
        return {"model": "m", "messages": [head, {"role": "user", "content": "hello " * 50}]}

    monday, tuesday = read(body("2026-11-30"), settings), read(body("2026-12-01"), settings)
    assert monday.chain == tuesday.chain
    assert common(read(body("2026-11-30")), read(body("2026-12-01"))) <= 1
    assert read(body("2026-11-30", "user"), settings).chain != monday.chain
    for odd in ([], ["text"], [{"role": "system"}], [{"role": "system", "content": [1]}], {"a": 1}):
        assert read({"model": "m", "messages": odd}, settings).model == "m"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"a": }', b'{"model": "\xff"}', b"\xff\xfe{}"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a JSON object"):
        read(body)


@pytest.mark.parametrize("odd", [None, 5, [], {}, True, "x"])
def test_odd_values_are_left_to_the_worker(odd: Any) -> None:
    fields = ("model", "messages", "prompt", "input", "tools", "system", "user", "priority", "prompt_cache_key")
    for field in fields:
        prompt = read({"model": "m", "messages": [], field: odd})
        assert isinstance(prompt.model, str)
        assert isinstance(prompt.priority, int)


def test_session_and_priority() -> None:
    assert read(chat("x", user="u", priority=-5)).session == b"u"
    assert read(chat("x", user="u", prompt_cache_key="k")).session == b"k"
    assert read(chat("x", user="u"), session=b"h").session == b"h"
    assert read(chat("x", priority=-5)).priority == -5
    assert read(chat("x", priority=10**12)).priority == 1000
    assert read(chat("x", priority=1.5)).priority == 0


def test_a_million_tokens_are_read_and_bounded() -> None:
    prompt = read(chat("word " * 800_000), KeySettings())
    assert 999_000 < prompt.tokens < 1_001_000
    assert len(prompt.chain) == 8 * (prompt.tokens * 4 // 2048)
    assert len(read(chat("x" * 64 * (MAX_BLOCKS + 5))).chain) == 8 * MAX_BLOCKS


def test_beyond_the_fine_blocks_keys_cover_several() -> None:
    """Prompts that agree have equal keys up to where they part, and never more than three blocks beyond."""
    text = "".join(f"{number:08d}" for number in range(400 * 8))  # a block is 64 bytes: 400 blocks
    keys = KeySettings(block_bytes=64)
    for part in (100, 255, 256, 257, 300, 303, 399):
        other = text[: part * 64] + "x" * (400 - part) * 64
        ours, theirs = (chain_keys(memoryview(one.encode()), b"seed", keys.block_bytes) for one in (text, other))
        equal = sum(ours[i : i + 8] == theirs[i : i + 8] for i in range(0, len(ours), 8))
        assert part <= equal <= (part if part < FINE_BLOCKS else part + COARSE - 1)
        assert ours[: equal * 8] == theirs[: equal * 8]
        begun = chain_keys(memoryview(text[: part * 64].encode()), b"seed", keys.block_bytes)
        assert ours[: len(begun)] == begun


def test_salts_share_nothing() -> None:
    one, other, none = (read({"model": "m", "prompt": "x" * 9000, **more}) for more in (
        {"cache_salt": "a"}, {"cache_salt": "b"}, {}))  # fmt: skip
    assert len({one.chain[:8], other.chain[:8], none.chain[:8]}) == 3


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(InvalidRequestError):
        read(b'{"messages": ' + b"[" * 100_000)


# --- configuration


@pytest.mark.parametrize(
    ("text", "url", "group"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000", ""),
        ("http://host:80/", "http://host:80", ""),
        ("long=http://[::1]:9", "http://[::1]:9", "long"),
    ],
)
def test_workers(text: str, url: str, group: str) -> None:
    worker = parse_worker(text)
    assert (worker.url, worker.group) == (url, group)


@pytest.mark.parametrize(
    "text",
    [
        "host:80",
        "https://h:1",
        "http://h",
        "http://h:1/v1",
        "http://h:99999",
        "http://u:p@h:1",
        "",
        "http://:1",
        "http://[::1:1",
    ],
)
def test_a_worker_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(ConfigError, match="write http://host:port"):
        parse_worker(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing.policy": "cache_awar"}, "did you mean 'cache_aware'"),
        ({"workers.urls": ("long=http://h:1",)}, "which is no length bucket"),
        ({"workers.urls": ("http://h:1", "http://h:1")}, "given twice"),
        ({"cache.volatile_header": "("}, "not a regular expression"),
        ({"redis.url": "localhost:6379"}, "must begin with redis://"),
        ({"routing.bucket_by": "size"}, "routing.bucket_by"),
        ({"queue.max_wait": 3}, "did you mean 'queue.max_wait"),
    ],
)
def test_impossible_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(options=options)


def test_secrets_come_from_the_environment_and_are_not_shown() -> None:
    environment = {"CYGNET_API_KEY": "a, b", "CYGNET_WORKER_API_KEY": "w", "CYGNET_ADMIN_KEY": "x"}
    config, sources = resolve(environment=environment)
    assert config.auth.api_keys == ("a", "b")
    assert config.workers.api_key == "w"
    assert sources["auth.api_keys"] == "env CYGNET_API_KEY"
    with pytest.raises(ConfigError) as caught:
        resolve(options={"auth.api_keys": 7777})
    assert "7777" not in str(caught.value)
    assert resolve()[0] == RouterConfig()
