"""The small endpoints, the page, the log, the metrics, the socket."""

import asyncio
import logging
import re
import socket
import threading
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.harness import MODEL, TOKENIZER, endless, fake_engine, in_loop, serving
from cygnet.api import body, openapi
from cygnet.api.app import create_app
from cygnet.api.card import ModelCard
from cygnet.api.routes import STATIC
from cygnet.api.server import Server, listen
from cygnet.api.tokenization import TokenizerPool
from cygnet.base.cache_report import CacheReport
from cygnet.base.config import ApiSettings
from cygnet.base.errors import ConfigError, QueueFullError
from cygnet.base.messages import EngineStats, PoolStats
from cygnet.metrics.catalogue import CATALOGUE, RECORDED, kv_usage
from cygnet.metrics.prometheus import Exposition
from cygnet.metrics.recorder import Recorder
from fakes.tokenizer import BOS, FIRST_WORD

LOGGER = "cygnet.api.access"


@in_loop
async def test_models() -> None:
    async with serving() as s:
        listed = await s.openai.models.list()
        assert [m.id for m in listed.data] == [MODEL]
        one = await s.openai.models.retrieve(MODEL)
        assert one.owned_by == "cygnet"
        assert one.model_dump()["max_model_len"] == 4096


@in_loop
async def test_tokenize_and_detokenize() -> None:
    async with serving() as s:
        answer = (await s.post("/tokenize", {"prompt": "hello world", "return_token_strs": True})).json()
        assert answer["tokens"] == [BOS, FIRST_WORD, FIRST_WORD + 1]
        assert answer["count"] == 3
        assert answer["max_model_len"] == 4096
        assert answer["token_strs"] == ["<bos>", "hello", " world"]
        bare = (await s.post("/tokenize", {"prompt": "hello", "add_special_tokens": False})).json()
        assert bare["tokens"] == [FIRST_WORD]
        chat = (await s.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
        assert TOKENIZER.decode(chat["tokens"]) == "user: x\nassistant: "
        text = (await s.post("/detokenize", {"tokens": [BOS, FIRST_WORD]})).json()
        assert text == {"prompt": "<bos>hello"}
        skipped = (await s.post("/detokenize", {"tokens": [BOS, FIRST_WORD], "skip_special_tokens": True})).json()
        assert skipped == {"prompt": "hello"}
        for path, wrong, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/detokenize", {"tokens": [99999]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ):
            response = await s.post(path, wrong)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


@in_loop
async def test_long_prompt_is_tokenized_in_a_thread() -> None:
    async with serving(fake_engine(max_model_len=100_000)) as s:
        text = "hello world " * 5000
        answer = (await s.complete(prompt=text)).json()
        assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode(text))


@in_loop
async def test_tokenizer_pool_is_bounded() -> None:
    pool = TokenizerPool(TOKENIZER, workers=1, max_pending=2)
    gate = threading.Event()
    try:
        waiting = [asyncio.create_task(pool.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await pool.run(lambda: None)
        gate.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert pool.pending == 0
    finally:
        gate.set()
        pool.close()


@in_loop
async def test_metrics_parse_and_count() -> None:
    async with serving() as s:
        for _ in range(3):
            await s.complete(prompt="the same prompt again")
        await s.complete(temperature=-1)
        await s.http.get("/made-up-path")
        response = await s.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert response.headers["content-type"].startswith("text/plain")
        samples = {
            (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
            if sample.labels["model_name"] == MODEL
        }
        prompt = len(TOKENIZER.encode("the same prompt again"))
        assert samples[("vllm:prompt_tokens_total",)] == 3 * prompt
        assert samples[("vllm:generation_tokens_total",)] == 9
        assert samples[("vllm:prefix_cache_queries_total",)] == 3 * prompt
        assert samples[("vllm:prefix_cache_hits_total",)] == 2 * ((prompt - 1) // 4 * 4) > 0
        assert samples[("vllm:request_success_total", ("finished_reason", "stop"))] == 3
        assert samples[("vllm:time_to_first_token_seconds_count",)] == 3
        assert samples[("vllm:e2e_request_latency_seconds_count",)] == 3
        assert samples[("vllm:inter_token_latency_seconds_count",)] == 6
        assert samples[("vllm:request_time_per_output_token_seconds_count",)] == 3
        assert samples[("vllm:num_requests_running",)] == 0
        assert samples[("cygnet:pool_blocks", ("group", "swa"), ("state", "free"), ("tier", "device"))] == 40
        assert samples[("cygnet:http_requests_total", ("route", "/v1/completions"), ("status", "400"))] == 1
        assert samples[("cygnet:http_requests_total", ("route", "other"), ("status", "404"))] == 1
        assert not any("made-up" in str(key) for key in samples)


def test_catalogue_covers_every_statistic() -> None:
    """Each field of the engine's snapshot moves some metric."""
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))
    pool = PoolStats(num_blocks=10, free=3, used=4, cached=3, block_bytes=5)
    pools = {"full", "swa", "host_full", "host_swa"}
    baseline = Exposition(lambda: EngineStats(full=pool, swa=pool), Recorder(RECORDED), "m").render()
    other = PoolStats(num_blocks=11, free=3, used=4, cached=4, block_bytes=5)
    for name in EngineStats.__struct_fields__:
        changed = EngineStats(**{"full": pool, "swa": pool, name: other if name in pools else 7})
        if name == "last_step_tokens":
            continue  # the page's business: as a metric, it is covered by count and sum of steps
        assert Exposition(lambda c=changed: c, Recorder(RECORDED), "m").render() != baseline, name  # type: ignore[misc]


def test_hits_by_tier_add_up() -> None:
    """And vLLM's two pairs of counters mean what they mean there: device, and what lies below it."""
    stats = EngineStats(
        prefix_query_tokens_total=100,
        effective_hit_tokens_total=60,
        host_hit_tokens_total=20,
        store_hit_tokens_total=10,
        host_full=PoolStats(num_blocks=10, free=10),
    )
    text = Exposition(lambda: stats, Recorder(RECORDED), "m").render()[0].decode()
    samples = {
        (sample.name, sample.labels.get("tier")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert [samples["cygnet:hit_tokens_total", tier] for tier in ("device", "host", "store")] == [30, 20, 10]
    assert samples["vllm:prefix_cache_queries_total", None] == 100
    assert samples["vllm:prefix_cache_hits_total", None] == 30
    assert samples["vllm:external_prefix_cache_queries_total", None] == 70
    assert samples["vllm:external_prefix_cache_hits_total", None] == 30


def test_kv_usage_is_that_of_the_tighter_pool() -> None:
    stats = EngineStats(full=PoolStats(num_blocks=10, used=1), swa=PoolStats(num_blocks=4, used=3))
    assert kv_usage(stats) == 0.75
    assert kv_usage(EngineStats(full=PoolStats(num_blocks=10, used=1))) == 0.1


@in_loop
async def test_state_page_docs_and_files() -> None:
    async with serving() as s:
        state = (await s.http.get("/api/state")).json()
        assert state["model"]["id"] == MODEL
        assert state["stats"]["swa"]["num_blocks"] == 40
        assert state["healthy"] is True
        assert (await s.http.get("/version")).json()["version"]
        for path in ("/", "/docs"):
            page = await s.http.get(path)
            assert page.headers["content-type"].startswith("text/html")
            assert "default-src 'self'" in page.headers["content-security-policy"]
            for file in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
                assert (await s.http.get(file)).status_code == 200, file
        described = (await s.http.get("/openapi.json")).json()
        assert set(described["paths"]) == {op.path for op in openapi.OPERATIONS}
        text = str(described)
        for name in re.findall(r"#/components/schemas/(\w+)", text):
            assert name in described["components"]["schemas"]
        (limit,) = described["paths"]["/cache"]["get"]["parameters"]
        assert (limit["name"], limit["in"], limit["schema"]["maximum"]) == ("limit", "query", 1000)
        for operation in openapi.OPERATIONS:
            if operation.example is not None:
                assert (await s.post(operation.path, operation.example)).status_code == 200


def test_page_needs_nothing_from_elsewhere() -> None:
    for file in Path(STATIC).iterdir():
        addresses = re.findall(r"https?://[^\s\"'`]+", file.read_text())
        assert [a for a in addresses if not a.startswith("http://www.w3.org/")] == [], file.name


@in_loop
async def test_request_ids() -> None:
    async with serving() as s:
        given = await s.http.get("/health", headers={"x-request-id": "abc-1.2:3_x"})
        assert given.headers["x-request-id"] == "abc-1.2:3_x"
        for bad in ("a b", "x" * 129, 'quote"', ""):
            made = await s.http.get("/health", headers={"x-request-id": bad})
            assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])
        twice = await asyncio.gather(
            *(s.post("/v1/completions", {"prompt": "a"}, **{"x-request-id": "same"}) for _ in "ab")
        )
        assert [r.status_code for r in twice] == [200, 200]
        assert twice[0].json()["id"] != twice[1].json()["id"]


@in_loop
async def test_access_log_says_numbers_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    async with serving(api_key="s3cret") as s:
        await s.post("/v1/completions", {"prompt": "hello"}, **{"x-request-id": "me"})
        await s.http.get("/v1/models?token=hidden%0Anewline")
        await s.http.get("/a%0Ab")
        await s.complete(stream=True, max_tokens=1)
        await s.complete(temperature=-1)
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert re.fullmatch(r"POST /v1/completions 200 [\d.]+ms prompt=2 cached=0 completion=3 id=me", lines[0])
    assert lines[1].startswith("GET /v1/models 200 ")
    assert lines[2].startswith("GET /a%0Ab 404 ")
    assert "completion=1" in lines[3]
    assert re.search(r" 400 .*error=invalid_request_error", lines[4])
    everything = "\n".join(lines)
    assert "hello" not in everything
    assert "s3cret" not in everything
    assert "hidden" not in everything


@in_loop
async def test_access_log_says_from_which_tier(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    async with serving(fake_engine(tiers=("device", "host"))) as s:
        for _ in "ab":
            await s.complete(prompt="one two three four five six seven eight nine")
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert " cached=0 device=0 host=0 store=0 completion=" in lines[0]
    assert " cached=44 device=40 host=4 store=0 completion=" in lines[1]


@in_loop
async def test_cache_report() -> None:
    async with serving(fake_engine(tiers=("device", "host"))) as s:
        for number in range(25):
            await s.complete(prompt=f"prompt {number} of a good many words", max_tokens=1)
        report = msgspec.json.decode((await s.http.get("/cache")).content, type=CacheReport)
        assert (report.num_sequences, len(report.sequences)) == (25, 20)
        assert report.tiers == ("device", "host")
        assert len((await s.http.get("/cache?limit=3")).json()["sequences"]) == 3
        for query, param in (
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("limit=few", "limit"),
            ("lmit=3", "lmit"),
        ):
            response = await s.http.get(f"/cache?{query}")
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        await s.engine.aclose()
        assert (await s.http.get("/cache")).status_code == 503


@in_loop
async def test_flush_says_what_it_dropped() -> None:
    async with serving(fake_engine(tiers=("device", "host", "store"))) as s:
        await s.complete(prompt="one two three four five six seven eight nine")
        dropped = (await s.post("/reset_prefix_cache", None)).json()
        assert dropped["status"] == "ok"
        assert dropped["dropped"]["device_blocks"] == 11
        assert dropped["dropped"]["store"] is False
        assert (await s.post("/reset_prefix_cache?store=true", None)).json()["dropped"]["store"] is True
        assert (await s.post("/reset_prefix_cache?store=perhaps", None)).json()["error"]["param"] == "store"
    async with serving() as s:
        refused = await s.post("/reset_prefix_cache?store=true", None)
        assert refused.status_code == 400
        assert "--store" in refused.json()["error"]["message"]
        assert s.engine.flushes == 0


@in_loop
async def test_access_log_of_a_disconnect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=LOGGER)
    engine = fake_engine(endless, manual=True)
    async with serving(engine) as s:
        asking = asyncio.create_task(s.complete(max_tokens=900))
        await engine.wait_added(1)
        asking.cancel()
        await asyncio.wait([asking])
        await engine.wait_idle()
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert " 499 " in lines[0]


@in_loop
async def test_stalled_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as s:
        monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer
        writer.close()
        await writer.wait_closed()


def test_listen_says_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}.*in use"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="resolved"):
        listen("no such host!", 0)


@in_loop
async def test_port_taken_after_binding() -> None:
    app = create_app(fake_engine(), TOKENIZER, ApiSettings(), ModelCard(id=MODEL, created=0))
    with listen("127.0.0.1", 0) as mine, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(mine.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match="can't listen on port"):
            await Server(app, ApiSettings()).run_on(mine)


@in_loop
async def test_listens_on_loopback_only_by_default() -> None:
    async with serving() as s:
        assert s.url.startswith("http://127.0.0.1:")
        assert isinstance(s.http, httpx.AsyncClient)
