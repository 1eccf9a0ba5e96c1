"""The load generator: what it asks, what it times, what it reports, and that it is the same for the same seed."""

import asyncio
import contextlib
import gzip
import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.fake_openai import FakeOpenAI
from cygnet.base.errors import ConfigError
from cygnet.cli.bench.client import Client, Result, Stream, error_text
from cygnet.cli.bench.connection import ConnectionFailed, Connections
from cygnet.cli.bench.stats import metrics_delta, parse_metrics, percentile, spread_ms, summarize
from cygnet.cli.bench.traces import load_trace
from cygnet.cli.bench.workload import FIRST_TOKEN, TokenSource
from cygnet.sim.sessions import Piece, Session, Turn, limited, random_sessions, sped_up, with_poisson_arrivals

# --- what is asked


def test_tokens_depend_on_seed_and_key_alone() -> None:
    one, same, other = TokenSource(1, 30_000), TokenSource(1, 30_000), TokenSource(2, 30_000)
    pieces = [Piece("shared", 100), Piece("own", 20)]
    assert one.token_ids(pieces) == same.token_ids(pieces)
    assert one.token_ids(pieces) != other.token_ids(pieces)
    assert len(one.token_ids(pieces)) == 120
    assert all(FIRST_TOKEN <= token < 30_000 for token in one.token_ids(pieces))
    assert one.token_ids([Piece("shared", 30)]) == one.token_ids(pieces)[:30], "a shorter piece is not a prefix"
    assert len(one.text(pieces).split()) == 120
    with pytest.raises(ValueError, match="vocab_size"):
        TokenSource(1, 500)


def test_random_sessions_share_their_prefix_and_grow() -> None:
    sessions = random_sessions(num_sessions=3, turns=2, input_len=10, output_len=4, shared_prefix_len=50)
    tokens = TokenSource(0, 30_000)
    first = [tokens.token_ids(session.turns[0].pieces) for session in sessions]
    assert [len(prompt) for prompt in first] == [60] * 3
    assert first[0][:50] == first[1][:50] == first[2][:50]
    assert first[0][50:] != first[1][50:]
    assert [turn.input_len for turn in sessions[0].turns] == [60, 10]
    assert sessions[0].growing
    assert not random_sessions(num_sessions=1, turns=1, input_len=1, output_len=1, shared_prefix_len=0)[0].growing


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    sessions = random_sessions(num_sessions=4000, turns=1, input_len=1, output_len=1, shared_prefix_len=0)
    arrivals = [s.arrival_s or 0.0 for s in with_poisson_arrivals(sessions, 50.0, seed=3)]
    assert arrivals == [s.arrival_s for s in with_poisson_arrivals(sessions, 50.0, seed=3)]
    assert arrivals != [s.arrival_s for s in with_poisson_arrivals(sessions, 50.0, seed=4)]
    assert arrivals == sorted(arrivals)
    assert 4000 / arrivals[-1] == pytest.approx(50, rel=0.1)
    gaps = sorted(b - a for a, b in pairwise(arrivals))
    assert gaps[len(gaps) // 2] == pytest.approx(0.693 / 50, rel=0.15), "not exponential"


def test_limits_cut_the_end_of_a_prompt() -> None:
    long = Session((Turn(pieces=(Piece("a", 300), Piece("b", 300)), output_len=50),))
    text = Session((Turn(text="x" * 4000, output_len=500),))
    (cut, cut_text), shortened = limited([long, text], max_input=None, max_output=None, max_total=400)
    assert cut.turns[0].pieces == (Piece("a", 300), Piece("b", 50))
    assert cut.turns[0].output_len == 50
    assert cut_text.turns[0].output_len == 200
    assert cut_text.turns[0].input_len == 200
    assert shortened == 2
    (kept,), shortened = limited([long], max_input=600, max_output=50, max_total=None)
    assert (kept, shortened) == (long, 0)
    (cut,), shortened = limited([long], max_input=10, max_output=5, max_total=None)
    assert (cut.turns[0].input_len, cut.turns[0].output_len, shortened) == (10, 5, 1)


# --- traces


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]},
        {"timestamp": 2500, "input_length": 600, "output_length": 9, "hash_ids": [5, 9]},
    ]
    first, second = load_trace(write(tmp_path / "t.jsonl.gz", "\n".join(map(json.dumps, rows))), 10)
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.5)
    assert [piece.length for piece in first.turns[0].pieces] == [512, 512, 76]
    assert (second.turns[0].input_len, second.turns[0].output_len) == (600, 9)
    tokens = TokenSource(0, 30_000)
    one, two = tokens.token_ids(first.turns[0].pieces), tokens.token_ids(second.turns[0].pieces)
    assert one[:512] == two[:512]
    assert one[512:600] != two[512:600]


def test_agentic(tmp_path: Path) -> None:
    def row(name: str) -> dict[str, Any]:
        requests = [[0.0, 1300, 20, 0, 0.0, 1.0, 0, [0, 1, 2]], [9.0, 1536, 30, 0, 2.5, 1.0, 2, [7]]]
        return {"id": name, "tool_tokens": 500, "system_tokens": 100, "model": "m", "requests": requests}

    one, two = load_trace(write(tmp_path / "t.jsonl", json.dumps(row("a")) + "\n" + json.dumps(row("b"))), 10)
    assert [turn.output_len for turn in one.turns] == [20, 30]
    assert [turn.input_len for turn in one.turns] == [1300, 1536]
    assert one.turns[1].delay_s == 2.5
    assert sped_up(one, 5.0).turns[1].delay_s == 0.5
    assert not one.growing
    keys = [[piece.key for piece in turn.pieces] for turn in one.turns]
    assert keys[0][:2] == keys[1][:2], "the second request does not continue the first"
    assert keys[0][2] != keys[1][2]
    others = [piece.key for piece in two.turns[0].pieces]
    assert [mine == theirs for mine, theirs in zip(keys[0], others, strict=True)] == [True, False, False]


def test_agent_text(tmp_path: Path) -> None:
    rows = [
        {"file": "f", "i": 1, "timestamp": 5_000_000, "input": "b" * 40, "output": "y" * 8, "session_id": "s"},
        {"file": "f", "i": 0, "timestamp": 3_000_000, "input": "a" * 40, "output": "x" * 80, "session_id": "s"},
        {"file": "f", "i": 2, "timestamp": 4_000_000, "input": "c", "output": "", "session_id": "t"},
    ]
    one, two = load_trace(write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, rows))), 10)
    assert [turn.text for turn in one.turns] == ["a" * 40, "b" * 40]
    assert [turn.output_len for turn in one.turns] == [20, 2]
    assert (one.arrival_s, two.arrival_s, two.turns[0].output_len) == (0.0, 1.0, 1)


def test_azure(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n"
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}"
    one, two = load_trace(write(tmp_path / "t.csv", text), 10)
    assert (one.turns[0].input_len, one.turns[0].output_len) == (4808, 10)
    assert two.arrival_s == pytest.approx(0.5)
    assert one.turns[0].pieces != two.turns[0].pieces
    assert len(load_trace(tmp_path / "t.csv", 1)) == 1


@pytest.mark.parametrize("text", ["", "what, is, this\n1,2,3\n", '{"foo": 1}\n', '{"hash_ids": [1]}\n', "{not json"])
def test_an_unknown_format_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"trace .*t\.jsonl"):
        load_trace(write(tmp_path / "t.jsonl", text), 10)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_bytes(b"not gzip")
    for name in ("t.gz", "absent.jsonl"):
        with pytest.raises(ConfigError, match="can't read trace"):
            load_trace(tmp_path / name, 10)


# --- what is timed


class Clock:
    """Stands in for the monotonic clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("cygnet.cli.bench.client.time.perf_counter", lambda: self.now)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"text": piece, "finish_reason": finish}])


def test_times_are_measured_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = Stream()
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    for now, data in (
        (100.5, text("a")),
        (100.6, text("b")[:10]),  # half an event: nothing has arrived yet
        (100.7, text("b")[10:]),
        (101.0, text("c d") + text("e")),
        (101.4, text("", "length")),  # no token: neither a gap nor a later end
        (101.5, event(choices=[], usage=usage)),
        (101.6, b"data: [DONE]\n\n"),
    ):
        clock.now = now
        stream.feed(200, data)
    stream.end()
    result = stream.result
    assert result.error == ""
    assert result.text == "abc de"
    assert result.ttft == pytest.approx(0.5)
    assert result.itl == pytest.approx([0.2, 0.3, 0.0])
    assert result.latency == pytest.approx(1.0)
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (9, 5, 4)
    assert result.tpot == pytest.approx(0.5 / 4)


def test_chat_events_and_missing_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = Stream()
    stream.feed(200, event(choices=[{"delta": {"role": "assistant", "content": ""}}]))
    clock.now = 101.0
    stream.feed(
        200, event(choices=[{"delta": {"reasoning_content": "hm"}}]) + event(choices=[{"delta": {"content": "x"}}])
    )
    stream.feed(200, b"data: [DONE]\n")
    stream.end()
    assert stream.result.ttft == pytest.approx(1.0), "announcing the role is no output"
    assert (stream.result.text, stream.result.output_tokens) == ("hmx", 2)
    assert stream.result.cached_tokens is None


def test_an_answer_without_text_still_has_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = Stream()
    clock.now = 100.25
    stream.feed(200, text("", "stop") + b"data: [DONE]\n")
    stream.end()
    assert (stream.result.error, stream.result.ttft, stream.result.latency) == ("", 0.25, 0.25)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (text("a"), "stream cut"),
        (b"data: {oops\n", "bad chunk"),
        (event(error={"message": "engine died"}) + b"data: [DONE]\n", "error in stream"),
    ],
)
def test_a_bad_stream_is_a_failure(data: bytes, error: str) -> None:
    stream = Stream()
    stream.feed(200, data)
    stream.end()
    assert stream.result.error == error
    assert stream.result.error_detail


def test_error_bodies() -> None:
    assert error_text(b'{"error": {"message": "no"}}') == "no"
    assert error_text(b'{"detail": "gone"}') == "gone"
    assert error_text(b"<html>oops") == "<html>oops"


def test_percentiles_and_totals() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 90) == pytest.approx(3.7)
    assert percentile([7.0], 99) == 7.0
    assert spread_ms([]) is None
    spread = spread_ms([0.003, 0.001, 0.002])
    assert spread is not None
    assert (spread.mean, spread.median, spread.count) == (pytest.approx(2.0), 2.0, 3)
    good = Result(ttft=0.1, itl=[0.2, 0.2], latency=0.5, prompt_tokens=10, output_tokens=3, cached_tokens=5)
    one_token = Result(ttft=0.1, latency=0.1, prompt_tokens=10, output_tokens=1, cached_tokens=0)
    bad = Result(error="HTTP 429", error_detail="full", prompt_tokens=99)
    summary = summarize([good, one_token, bad, bad], duration_s=2.0)
    assert (summary.completed, summary.failed, summary.failures) == (2, 2, {"HTTP 429": 2})
    assert (summary.input_tokens, summary.output_tokens, summary.cached_share) == (20, 4, 0.25)
    assert (summary.request_throughput, summary.output_throughput, summary.total_throughput) == (1.0, 2.0, 12.0)
    assert summary.tpot_ms is not None
    assert (summary.tpot_ms.count, summary.tpot_ms.mean) == (1, pytest.approx(200.0))
    assert summarize([bad], 1.0).ttft_ms is None
    assert summarize([], 1.0).cached_share is None


def test_counters_of_a_metrics_page() -> None:
    page = (
        '# TYPE cygnet:a_total counter\ncygnet:a_total{x="1 2"} 3\ncygnet:a_total{x="}"} 4\n'
        "# TYPE vllm:b counter\nvllm:b_total 5.0\nvllm:b_created 1e9\n"
        "# TYPE vllm:g gauge\nvllm:g 7\n# TYPE other_total counter\nother_total 9\n"
    )
    counters = parse_metrics(page)
    assert counters == {"cygnet:a_total": 7.0, "vllm:b_total": 5.0}
    assert metrics_delta({"cygnet:a_total": 6.0, "vllm:b_total": 5.0}, counters) == {"cygnet:a_total": 1.0}


# --- the connection


class RawServer:
    """Answers each request on a connection with the next of `answers`; closes the connection after the last, or when
    the client does. Use as an async context manager; on leaving, all connections are closed."""

    def __init__(self, *answers: bytes, close: bool = True) -> None:
        self._answers, self._close = list(answers), close
        self._handlers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        await asyncio.gather(*self._handlers)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handlers.append(asyncio.create_task(self._answer(reader, writer)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answers.pop(0))
        if not self._close:
            await reader.read()
        elif self._answers:
            await reader.readuntil(b"\r\n\r\n")  # the next request comes here and finds the door shut
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def fetch_from(answer: bytes, *, close: bool = True, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """What `Connections` makes of a raw answer."""
    async with RawServer(answer, close=close) as address:
        connections = Connections(address)
        try:
            return await connections.fetch("GET", "/", timeout_s=timeout_s)
        finally:
            connections.close()


def test_bodies_end_by_length_chunks_or_close() -> None:
    for answer in (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
    ):
        assert asyncio.run(fetch_from(answer)) == (200, b"ok")


@pytest.mark.parametrize(
    ("answer", "close", "kind"),
    [
        (b"", True, "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", True, "stream cut"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n", True, "stream cut"),
        (b"SMTP ready\r\n\r\n", True, "bad HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok", False, "timeout"),
    ],
)
def test_broken_answers_have_a_kind(answer: bytes, close: bool, kind: str) -> None:
    with pytest.raises(ConnectionFailed) as failed:
        asyncio.run(fetch_from(answer, close=close, timeout_s=0.2 if kind == "timeout" else 5.0))
    assert failed.value.kind == kind


def test_a_dropped_kept_connection_is_replaced() -> None:
    async def run() -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        async with RawServer(answer, answer) as address:
            connections = Connections(f"http://{address}/v1/")
            assert await connections.fetch("GET", "/") == (200, b"ok")
            assert await connections.fetch("GET", "/") == (200, b"ok")
            connections.close()

    asyncio.run(run())


def test_addresses() -> None:
    for bad in ("ftp://x", "http://"):
        with pytest.raises(ValueError, match="address"):
            Connections(bad)
    with pytest.raises(ConnectionFailed) as failed:
        asyncio.run(Connections("http://127.0.0.1:9").fetch("GET", "/"))
    assert failed.value.kind == "connect"


# --- whole runs against a server


def bench(invoke: Any, fake: FakeOpenAI, *args: str) -> Any:
    return invoke("bench", "serve", "--url", fake.url, *args)


def test_a_run_is_reported(invoke: Any, fake: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    args = ["--num-prompts", "5", "--concurrency", "2", "--input-len", "20", "--output-len", "7"]
    result = bench(invoke, fake, *args, "--shared-prefix-len", "10", "--json", str(file))
    assert result.exit_code == 0, result.output
    asked = [request for request in fake.requests if len(request["prompt"]) == 30]
    assert len(asked) == 5
    assert len({tuple(request["prompt"][:10]) for request in asked}) == 1
    assert all(request["ignore_eos"] and request["stream"] and request["max_tokens"] == 7 for request in asked)
    assert fake.most_at_once <= 2
    report = {line.split(":  ")[0].strip(): line.split()[-1] for line in result.stdout.splitlines() if ":  " in line}
    assert report["Successful requests"] == "5"
    assert report["Total input tokens"] == "150"
    assert report["Total generated tokens"] == "35"
    assert report["Cached share of input (%)"] == "50.00"
    assert report["vllm:prefix_cache_hits_total"] == "75"
    for measure in ("TTFT", "TPOT", "ITL", "E2EL"):
        for statistic in ("Mean", "Median", "P90", "P99"):
            assert f"{statistic} {measure} (ms)" in report
    written = msgspec.json.decode(file.read_bytes())
    assert written["summary"]["completed"] == 5
    assert written["settings"]["model"] == "fake"
    assert len(written["requests"]) == 5
    assert written["server_counters"] == {"vllm:prefix_cache_hits_total": 75}


def test_the_same_seed_asks_the_same(invoke: Any, fake: FakeOpenAI) -> None:
    asked = []
    for seed in ("1", "1", "2"):
        fake.requests.clear()
        bench(invoke, fake, "--num-prompts", "3", "--concurrency", "1", "--seed", seed, "--output-len", "1")
        asked.append([request["prompt"] for request in fake.requests])
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize("form", ["tokens", "text", "chat"])
def test_sessions_grow_by_the_answers(invoke: Any, fake: FakeOpenAI, form: str) -> None:
    fake.behaviour.takes_token_ids = form != "text"
    extra = ["--endpoint", "chat"] if form == "chat" else []
    args = ["--num-prompts", "1", "--turns", "3", "--input-len", "10", "--output-len", "2"]
    result = bench(invoke, fake, *args, *extra)
    assert "Successful requests:                                   3" in result.stdout, result.output
    prompts = [request["messages" if form == "chat" else "prompt"] for request in fake.requests[-3:]]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    if form == "tokens":
        assert [len(prompt) for prompt in prompts] == [10, 22, 34]
        assert prompts[1][10:12] == [5005, 5005], "the answer, as the server tokenizes it, is missing"
    elif form == "text":
        assert prompts[1].split()[10:12] == ["word0", "word1"]
    else:
        roles = [message["role"] for message in prompts[2]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        assert prompts[2][1]["content"] == " word0 word1"


def test_without_a_tokenizer_sessions_grow_as_text(invoke: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.tokenizes = False
    bench(invoke, fake, "--num-prompts", "1", "--turns", "2", "--output-len", "1")
    assert isinstance(fake.requests[-1]["prompt"], str)


def test_failures_are_counted_by_kind(invoke: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.refuse_with = {1: (429, "queue is full"), 2: (429, "queue is full"), 3: (500, "boom")}
    fake.behaviour.cut = {4}
    result = bench(invoke, fake, "--num-prompts", "6", "--concurrency", "1", "--output-len", "4")
    assert result.exit_code == 0
    assert "2 x HTTP 429: queue is full" in result.stdout
    assert "1 x HTTP 500: boom" in result.stdout
    assert "1 x stream cut" in result.stdout
    assert "Failed requests:                                       4" in result.stdout


def test_all_failed_is_a_failure(invoke: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.refuse_with = dict.fromkeys(range(1, 9), (503, "down"))
    result = bench(invoke, fake, "--num-prompts", "3")
    assert result.exit_code == 1
    assert "3 x HTTP 503: down" in result.stdout


def test_a_server_that_refuses_at_once(cygnet: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.refuse_with = {0: (404, "no such model")}
    run = cygnet("bench", "serve", "--url", fake.url, "--model", "other")
    assert (run.returncode, run.stdout) == (1, "")
    assert "no such model" in run.stderr
    fake.behaviour.api_key = "k"
    assert "--api-key" in cygnet("bench", "serve", "--url", fake.url).stderr
    fine = cygnet("bench", "serve", "--url", fake.url, "--num-prompts", "1", env={"CYGNET_API_KEY": "k"})
    assert fine.returncode == 0, fine.stderr


def test_a_rate_is_an_open_loop(invoke: Any, fake: FakeOpenAI) -> None:
    """Requests start at their times although none has ended: the server answers only once all have come."""
    fake.behaviour.hold = threading.Event()
    original, seen = fake._generate, threading.Semaphore(0)

    def counted(http: Any, body: Any, number: int) -> None:
        if number == 0:
            fake.behaviour.hold, hold = None, fake.behaviour.hold
            original(http, body, number)  # the test request must not wait
            fake.behaviour.hold = hold
            return
        seen.release()
        if number == 4:
            assert fake.behaviour.hold is not None
            fake.behaviour.hold.set()
        original(http, body, number)

    fake._generate = counted  # type: ignore[method-assign]
    result = bench(invoke, fake, "--num-prompts", "4", "--rate", "200", "--output-len", "1", "--timeout", "20")
    assert "Successful requests:                                   4" in result.stdout, result.output
    assert "Request rate configured (RPS):                    200.00" in result.stdout
    assert fake.most_at_once == 4


def test_a_trace_is_replayed_within_limits(invoke: Any, fake: FakeOpenAI, tmp_path: Path) -> None:
    rows = [{"timestamp": 50 * i, "input_length": 700, "output_length": 30, "hash_ids": [1, 10 + i]} for i in range(4)]
    file = write(tmp_path / "t.jsonl.gz", "\n".join(map(json.dumps, rows)))
    args = ["--trace", str(file), "--num-prompts", "3", "--trace-speed", "10", "--output-len", "5"]
    result = bench(invoke, fake, *args)
    assert "Successful requests:                                   3" in result.stdout, result.output
    prompts = [request["prompt"] for request in fake.requests[-3:]]
    assert [len(prompt) for prompt in prompts] == [700] * 3
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert {request["max_tokens"] for request in fake.requests[-3:]} == {5}
    assert "3 requests are longer than the limits" in result.output
    fake.behaviour.max_model_len = 100
    bench(invoke, fake, "--trace", str(file), "--num-prompts", "1")
    assert len(fake.requests[-1]["prompt"]) == 70


def test_a_trace_may_be_cut_to_fewer_turns(invoke: Any, fake: FakeOpenAI, tmp_path: Path) -> None:
    rows = [
        {"file": "f", "i": i, "timestamp": i, "input": f"{session} {i}", "output": "four", "session_id": session}
        for session in ("one", "two")
        for i in range(3)
    ]
    file = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, rows)))
    result = bench(invoke, fake, "--trace", str(file), "--concurrency", "2", "--turns", "2")
    assert "Successful requests:                                   4" in result.stdout, result.output
    prompts = sorted(request["prompt"] for request in fake.requests[-4:])
    assert prompts == ["one 0", "one 1", "two 0", "two 1"]


@pytest.mark.parametrize(
    "args", [["--endpoint", "soap"], ["--num-prompts", "0"], ["--rate", "-1"], ["--seed", "-1"], ["--vocab-size", "9"]]
)
def test_impossible_settings_are_usage_errors(invoke: Any, fake: FakeOpenAI, args: list[str]) -> None:
    result = bench(invoke, fake, *args)
    assert result.exit_code == 2
    assert args[0] in result.output
    assert fake.requests == []


def test_the_client_can_be_used_by_itself(fake: FakeOpenAI) -> None:
    async def run() -> list[Result]:
        connections = Connections(fake.url)
        client = Client(connections, endpoint="completions", temperature=0.0, ignore_eos=True, timeout_s=5)
        assert await client.find_model("") == 4096
        results = [await client.send("one two three", 4), await client.send([1, 2], 2)]
        connections.close()
        return results

    first, second = asyncio.run(run())
    assert (first.error, first.text, first.output_tokens, first.prompt_tokens) == ("", " word0 word1 word2 word3", 4, 3)
    assert len(first.itl) == 3
    assert 0 < first.ttft <= first.latency
    assert second.prompt_tokens == 2
