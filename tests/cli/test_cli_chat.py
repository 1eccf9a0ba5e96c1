"""`cygnet chat`: the conversation as a user types it, against a server, and with a server of its own."""

import sys
from typing import Any

import pytest

from cli.fake_openai import FakeOpenAI
from cygnet.cli.child import ChildServer, ChildServerError


def test_a_conversation_is_remembered(invoke: Any, fake: FakeOpenAI) -> None:
    result = invoke("chat", "--url", fake.url, "--system", "Be kind", "--max-tokens", "3", stdin="Hello\nMore [b]\n")
    assert result.exit_code == 0
    assert result.output.count("word0 word1 word2") == 2
    first, second = (request["messages"] for request in fake.requests)
    assert first == [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    assert second == [
        *first,
        {"role": "assistant", "content": " word0 word1 word2"},
        {"role": "user", "content": "More [b]"},
    ]
    assert "3 tokens" in result.output
    assert "tok/s" in result.output
    assert "prompt tokens, " in result.output
    assert "cached" in result.output


def test_commands(invoke: Any, fake: FakeOpenAI) -> None:
    stdin = "one\n/reset\ntwo\n/system Short\nthree\n/stats\n/nonsense\n\n/quit\nnever\n"
    result = invoke("chat", "--url", fake.url, stdin=stdin)
    contents = [[message["content"] for message in request["messages"]] for request in fake.requests]
    assert contents == [["one"], ["two"], ["Short", "three"]]
    assert "3 answers, 18 tokens" in result.output
    assert result.output.count("/reset forgets") == 2, "an unknown command shows the help"


@pytest.mark.parametrize("why", ["no template", "base model", "asked for"])
def test_a_model_that_can_not_chat_completes(invoke: Any, fake: FakeOpenAI, why: str) -> None:
    fake.behaviour.has_chat_template = why != "no template"
    fake.behaviour.kind = "base" if why == "base model" else None
    extra = ["--completion"] if why == "asked for" else []
    result = invoke("chat", "--url", fake.url, *extra, stdin="Once upon\na time\n")
    assert "continues what you type" in result.output
    completions = [r["prompt"] for r, path in zip(fake.requests, fake.paths, strict=True) if path == "/v1/completions"]
    assert completions == ["Once upon", "a time"]
    assert ("/v1/chat/completions" in fake.paths) == (why == "no template")


def test_an_error_does_not_end_the_conversation(invoke: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.refuse_with = {0: (429, "queue is full")}
    fake.behaviour.cut = {1}
    result = invoke("chat", "--url", fake.url, stdin="one\ntwo\nthree\n")
    assert result.exit_code == 0
    assert "queue is full" in result.output
    assert "broke" in result.output
    assert fake.requests[2]["messages"] == [{"role": "user", "content": "three"}]


def test_a_key_is_sent(invoke: Any, fake: FakeOpenAI) -> None:
    fake.behaviour.api_key = "k"
    assert "word0" in invoke("chat", "--url", fake.url, "--api-key", "k", stdin="hi\n").output
    refused = invoke("chat", "--url", fake.url, stdin="hi\n")
    assert "--api-key" in str(refused.exception)


def test_settings_need_a_server_of_our_own(invoke: Any) -> None:
    result = invoke("chat", "--set", "kv.block_size=32")
    assert result.exit_code == 2
    assert "--model" in result.output


def test_a_child_that_does_not_start_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildServerError, match="exit code 1"), ChildServer("gemma3-270m", ["kv.blocksize=1"]):
        pass
    assert "did you mean 'kv.block_size'" in capfd.readouterr().err


def test_a_child_is_told_apart_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child here is a stand-in that prints what `cygnet serve` prints, and then waits."""
    script = "import time; print('loading'); print('m is ready on http://127.0.0.1:1234', flush=True); time.sleep(60)"
    child = ChildServer("m", [])
    monkeypatch.setattr(child, "_command", [sys.executable, "-c", script])
    with child:
        assert child.url == "http://127.0.0.1:1234"
        assert child._process.poll() is None
    assert child._process.returncode == -15


@pytest.mark.slow
def test_with_a_model_of_its_own(cygnet: Any) -> None:
    sets = ["--set", "kv.memory=256MiB", "--set", "engine.num_threads=1"]
    args = ["chat", "--model", "smollm2-135m-instruct", *sets, "--max-tokens", "6", "--temperature", "0"]
    run = cygnet(*args, stdin="Say hello.\n/stats\n")
    assert run.returncode == 0, run.stderr
    assert "smollm2-135m-instruct at http://127.0.0.1:" in run.stdout
    assert "1 answers, 6 tokens" in run.stdout
