"""`cygnet serve`: how options become a config, what is printed, and that it fails early."""

import asyncio
import io
import json
import os
import shlex
import socket
import tempfile
from typing import Any

import pytest
from rich.console import Console

from cygnet.base.config import Config
from cygnet.base.errors import EngineDeadError
from cygnet.cli.banner import READY_WORDS, Stages, example_request, print_banner, server_url


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configs that `cygnet serve` would run; nothing is started."""
    configs: list[Config] = []

    async def run_server(config: Config, level: str) -> None:
        configs.append(config)

    monkeypatch.setattr("cygnet.cli.server.run_server", run_server)
    monkeypatch.setattr("cygnet.cli.console.configure_logging", lambda level: None)
    return configs


def test_options_reach_their_settings(invoke: Any, served: list[Config]) -> None:
    args = (
        "serve smollm2-135m-instruct --host 0.0.0.0 --port 9000 --dtype float32 --device cpu --kv-cache-memory 2GiB "
        "--max-model-len 4096 --block-size 32 --max-num-seqs 8 --max-num-batched-tokens 256 --api-key k "
        "--served-model-name mine --set kv.eviction=lru --set kv.block_size=64"
    )
    assert invoke(*args.split()).exit_code == 0
    (config,) = served
    assert (config.model.model, config.model.served_name) == ("smollm2-135m-instruct", "mine")
    assert (config.model.dtype, config.model.device, config.model.max_model_len) == ("float32", "cpu", 4096)
    assert (config.kv.memory, config.kv.block_size, config.kv.eviction) == ("2GiB", 32, "lru")
    assert (config.engine.max_num_seqs, config.engine.max_num_batched_tokens) == (8, 256)
    assert (config.api.host, config.api.port, config.api.api_key) == ("0.0.0.0", 9000, "k")


def test_without_options_it_is_the_default(invoke: Any, served: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("serve").exit_code == 0
    monkeypatch.setenv("CYGNET_API_KEY", "from-env")
    assert invoke("serve").exit_code == 0
    assert served[0] == Config()
    assert served[1].api.api_key == "from-env"


def test_a_port_in_use_is_found_before_the_model_is_loaded(cygnet: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = cygnet("serve", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert run.returncode == 1
    assert "can't listen on 127.0.0.1" in run.stderr
    assert "no-such-model" not in run.stderr


def test_an_unknown_model_names_the_nearest(cygnet: Any) -> None:
    """The engine's process was on its way; nothing is left of it, its socket neither."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        run = cygnet("serve", "gemma3-270n", "--port", "0", env={"TMPDIR": folder})
        assert run.returncode == 1
        assert "'gemma3-270m'" in run.stderr
        assert "Traceback" not in run.stderr
        assert os.listdir(folder) == []


def test_a_chat_template_that_is_not_there(cygnet: Any) -> None:
    run = cygnet("serve", "smollm2-135m-instruct", "--port", "0", "--set", "model.chat_template=/nowhere.jinja")
    assert run.returncode == 1
    assert "/nowhere.jinja" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_dead_engine_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from cygnet.cli import server as module

    monkeypatch.setattr(module, "HEALTH_CHECK_S", 0.001)

    class Engine:
        healthy = True

    class Server:
        def __init__(self) -> None:
            self.stopped = asyncio.Event()

        def stop(self) -> None:
            self.stopped.set()

        async def run_on(self, listener: object) -> None:
            Engine.healthy = False
            await self.stopped.wait()

    async def run() -> None:
        with socket.socket() as listener:
            await module._run_watched(Server(), Engine(), listener)  # type: ignore[arg-type]

    with pytest.raises(EngineDeadError):
        asyncio.run(run())


def banner(config: Config, *, is_chat: bool = False, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False)
    print_banner(console, "http://127.0.0.1:8000", "m", "first\nsecond", "a note", config, is_chat=is_chat)
    return out.getvalue()


def test_the_banner_says_where_and_what() -> None:
    text = banner(Config())
    ready = next(line for line in text.splitlines() if READY_WORDS in line)
    assert ready.split()[-1] == "http://127.0.0.1:8000"
    assert all(part in text for part in ("first", "second", "a note", "/docs"))
    assert "warning" not in text
    open_to_all = Config(api=Config().api.__class__(host="0.0.0.0"))
    assert "warning" in banner(open_to_all)
    assert "warning" not in banner(Config(api=Config().api.__class__(host="0.0.0.0", api_key="k")))


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("with_key", [True, False])
def test_the_example_can_be_pasted(is_chat: bool, with_key: bool) -> None:
    words = shlex.split(example_request("http://h:1", "it's", is_chat=is_chat, with_key=with_key))
    assert words[:2] == ["curl", f"http://h:1/v1/{'chat/' if is_chat else ''}completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert ("messages" if is_chat else "prompt") in body
    assert ("Authorization: Bearer $CYGNET_API_KEY" in words) == with_key


def test_addresses_that_a_client_can_use() -> None:
    assert server_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert server_url("::", 80) == "http://[::1]:80"
    assert server_url("192.0.2.1", 80) == "http://192.0.2.1:80"


def test_stages_print_each_stage_once_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Stages(Console(file=out, width=80)) as stages:
        for done in (0, 1, 2):
            stages("loading [weights]", done, 2)
        stages("sizing pools")
    assert out.getvalue() == "loading [weights]\nsizing pools\n"
