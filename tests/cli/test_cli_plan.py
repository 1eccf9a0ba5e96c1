"""`cygnet plan`: names and files, tables and JSON, plots, errors."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cygnet.base.errors import ConfigError
from cygnet.cli.plan import parse_tokens

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip


def test_a_plan_as_tables(invoke: Any) -> None:
    result = invoke("plan", "mimo-v2.5-pro", "--gpu", "h20")
    assert result.exit_code == 0
    assert "16 (TP 8, EP 16)" in result.stdout
    assert "32 (TP 8, EP 32)" in result.stdout
    assert "6.99x" in result.stdout


def test_a_plan_as_json(invoke: Any) -> None:
    result = invoke("plan", "gemma-3-270m", "llama-3.1-8b", "--context", "32K", "--json")
    gemma, llama = json.loads(result.stdout)
    assert (gemma["full_bytes_per_token"], gemma["swa_bytes_per_token"], gemma["window"]) == (3072, 15_360, 511)
    assert gemma["rebuild_tokens"] == 15 * 511
    assert llama["costs"][-1] == {
        "tokens": 32_768,
        "kv_bytes": 32_768 * 131_072,
        "uniform_kv_bytes": 32_768 * 131_072,
        "attention_flops": llama["costs"][-1]["full_attention_flops"],
        "full_attention_flops": 32 * 32 * 256 * 2 * 32_768 * 32_769 // 2,
        "kv_ratio": 1.0,
        "flops_ratio": 1.0,
    }


def test_without_a_model_the_known_ones_are_listed(invoke: Any) -> None:
    assert "deepseek-v3.2" in invoke("plan").stdout
    listed = json.loads(invoke("plan", "--json").stdout)
    assert "gemma-3-27b" in listed["models"]
    assert "H20" in listed["gpus"]


def test_a_config_file_or_its_folder(invoke: Any, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json"):
        (made,) = json.loads(invoke("plan", str(path), "--json").stdout)
        assert (made["model"], made["full_bytes_per_token"]) == ("my-model", 2 * 2 * 64 * 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gemma-3-27"], "did you mean 'gemma-3-27b'"),
        (["gemma-3-27b", "--gpu", "H2O"], "did you mean 'H20'"),
        (["gemma-3-27b", "--context", "lots"], "128K"),
        (["gemma-3-27b", "--context", "1M"], "--context"),
        (["gemma-3-27b", "--plot", "x.gif"], "svg"),
    ],
)
def test_an_error_is_one_line_with_the_remedy(cygnet: Any, args: list[str], message: str) -> None:
    run = cygnet("plan", *args)
    assert (run.returncode, run.stdout) == (1, "")
    assert message in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_a_broken_config_is_named(cygnet: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    run = cygnet("plan", str(tmp_path))
    assert run.returncode == 1
    assert "is not a model's config.json" in run.stderr


def test_without_matplotlib_a_plot_says_how_to_get_it(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("plan", "gemma-3-1b", "--plot", "costs.svg")
    assert isinstance(result.exception, ConfigError)
    assert "cygnet[bench]" in str(result.exception)


@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_plots_are_images(invoke: Any, tmp_path: Path, form: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"costs.{form}"
    assert invoke("plan", "mimo-v2.5-pro", "llama-3.1-8b", "--plot", str(file)).exit_code == 0
    assert file.read_bytes().lstrip().startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[form])


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("128K", 131_072), ("1m", 1 << 20), (" 2 k ", 2048)])
def test_tokens_are_read(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5K", "1G", "many"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="128K"):
        parse_tokens(text)
