"""`cygnet cache`: what is printed of a report, what is asked of the server, and what goes wrong."""

import json
from typing import Any

import msgspec
import pytest

from cli.fake_openai import FakeOpenAI
from cygnet.base.cache_report import CacheReport, FlushReport, PoolReport, SequenceReport, WindowReport
from cygnet.cli.cache import dropped_lines, format_age, format_windows


def pool(tier: str, group: str, used: int, cached: int, free: int) -> PoolReport:
    total = used + cached + free
    return PoolReport(
        tier=tier, group=group, num_blocks=total, used=used, cached=cached, free=free, block_bytes=1 << 20
    )


def sequence(key: str, prefix: str, **fields: Any) -> SequenceReport:
    usual = {"device_tokens": 0, "host_tokens": 0, "store_tokens": 0, "shared_tokens": 0, "reuses": 0, "num_running": 0}
    return SequenceReport(key=key, prefix=prefix, **{**usual, "windows": (), "age_s": 1.0, **fields})


REPORT = CacheReport(
    block_size=16,
    window=511,
    tiers=("device", "host"),
    pools=(pool("device", "full", 3, 100, 1000), pool("device", "swa", 1, 2, 3), pool("host", "full", 0, 7, 8)),
    num_sequences=9,
    sequences=(
        sequence(
            "aaaa1111",
            "beef0000",
            num_tokens=4096,
            device_tokens=1024,
            host_tokens=4096,
            store_tokens=2048,
            shared_tokens=848,
            reuses=12,
            num_running=2,
            age_s=130.0,
            windows=(WindowReport(512, ("device", "host", "store")), WindowReport(4096, ("host",))),
        ),
        sequence("bbbb2222", "cafe0000", num_tokens=32),
        sequence("cccc3333", "beef0000", num_tokens=864, shared_tokens=848),
    ),
)


def lines_of(invoke: Any, fake: FakeOpenAI, report: CacheReport, *args: str) -> list[str]:
    fake.behaviour.cache = msgspec.to_builtins(report)
    result = invoke("cache", "inspect", "--url", fake.url, *args)
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def test_pools_in_blocks_tokens_and_bytes(invoke: Any, fake: FakeOpenAI) -> None:
    rows = [line.split() for line in lines_of(invoke, fake, REPORT)]
    assert rows[0] == ["tier", "group", "used", "cached", "free", "capacity"]
    assert rows[1] == ["device", "full", "blocks", "3", "100", "1,000", "1,103"]
    assert rows[2] == ["tokens", "48", "1,600", "16,000", "17,648"]
    assert rows[3] == ["bytes", "3", "MiB", "100", "MiB", "1000", "MiB", "1.08", "GiB"]
    assert rows[4][:3] == ["swa", "blocks", "1"]
    assert rows[7][:3] == ["host", "full", "blocks"]


def test_sequences_stand_together_by_prefix(invoke: Any, fake: FakeOpenAI) -> None:
    lines = lines_of(invoke, fake, REPORT)
    start = lines.index("9 sequences, the 3 used last:")
    names = [line.split()[0] for line in lines[start + 2 :] if line[:10].strip()]
    assert names[:5] == ["beef0000", "aaaa1111", "cccc3333", "cafe0000", "bbbb2222"]
    row = next(line for line in lines if "aaaa1111" in line).split()
    assert row[1:9] == ["4,096", "1,024", "4,096", "2,048", "848", "12", "2", "2m"]
    assert max(map(len, lines)) <= 80


def test_an_empty_cache_is_said_to_be_empty(invoke: Any, fake: FakeOpenAI) -> None:
    empty = msgspec.structs.replace(REPORT, num_sequences=0, sequences=())
    assert "nothing is cached" in lines_of(invoke, fake, empty)


def test_limit_and_json(invoke: Any, fake: FakeOpenAI) -> None:
    lines = lines_of(invoke, fake, REPORT, "--limit", "5", "--json")
    assert msgspec.convert(json.loads("\n".join(lines)), CacheReport) == REPORT
    assert fake.paths == ["/cache?limit=5"]


def test_windows_are_cut_to_the_last_ones() -> None:
    assert format_windows(()) == ""
    assert format_windows((WindowReport(1024, ("device", "store")),)) == "1,024 DS"
    many = tuple(WindowReport(16 * i, ("host",)) for i in range(1, 10))
    assert format_windows(many) == "3 more, 64 H, 80 H, 96 H, 112 H, 128 H, 144 H"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (200_000, "2d")])
def test_ages(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_flush_says_what_was_dropped(invoke: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.flushed = {"status": "ok", "dropped": msgspec.to_builtins(FlushReport(1200, 1, 30, 2, 4, True))}
    result = invoke("cache", "flush", "--url", fake.url, "--store")
    assert result.output.splitlines() == [
        "dropped on the device: 1,200 blocks and 1 retained window",
        "dropped in host memory: 30 blocks and 2 retained windows",
        "kept, as they are in use: 4 blocks",
        "the store gives up all that it has of this model",
    ]
    as_json = invoke("cache", "flush", "--url", fake.url, "--json")
    assert json.loads(as_json.output)["host_blocks"] == 30
    assert fake.paths == ["/reset_prefix_cache?store=true", "/reset_prefix_cache"]
    assert dropped_lines(FlushReport(0, 0)) == ["dropped on the device: 0 blocks and 0 retained windows"]


@pytest.mark.parametrize("verb", ["inspect", "flush"])
def test_what_goes_wrong_is_said(invoke: Any, fake: FakeOpenAI, verb: str) -> None:
    def failure() -> str:
        result = invoke("cache", verb, "--url", fake.url)
        assert result.exit_code == 1
        return str(result.exception)

    assert "no Cygnet server" in failure()
    fake.behaviour.cache = fake.behaviour.flushed = {"pools": 3}
    assert "one version" in failure()
    fake.behaviour.api_key = "k"
    assert "--api-key" in failure()
