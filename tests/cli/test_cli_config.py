"""`cygnet config show`."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cygnet.base.config import field_docs, resolve


def test_every_setting_is_shown_with_its_meaning(invoke: Any) -> None:
    output = invoke("config", "show").output
    for path, description in field_docs().items():
        assert path in output
        assert description.split(";")[0].split()[0] in output


def test_json_tells_value_and_source(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[kv]\nblock_size = 32\nmemory = '2GiB'\n")
    result = invoke("config", "show", "--json", "--config", str(file), "--set", "kv.memory=1GiB")
    shown = json.loads(result.stdout)
    assert shown["kv.block_size"]["value"] == 32
    assert shown["kv.block_size"]["source"] == f"file {file}"
    assert (shown["kv.memory"]["value"], shown["kv.memory"]["source"]) == ("1GiB", "--set")
    assert shown["api.port"]["source"] == "default"
    assert set(shown) == set(field_docs())
    text = invoke("config", "show", "--config", str(file)).stdout
    assert f"(file {file})" in text.replace("\n", "")


def test_toml_is_read_back_to_the_same_config(invoke: Any, tmp_path: Path) -> None:
    sets = ["kv.memory=1GiB", 'model.model=a "quoted" \\ name', "api.cors_origins=['http://x']", "kv.poison=true"]
    args = [part for item in sets for part in ("--set", item)]
    result = invoke("config", "show", "--toml", *args)
    file = tmp_path / "c.toml"
    file.write_text(result.stdout)
    assert resolve(file=file).config == resolve(sets=sets).config
    assert set(tomllib.loads(result.stdout)) == {"model", "kv", "engine", "api"}


@pytest.mark.parametrize("form", [[], ["--json"], ["--toml"]])
def test_secrets_are_hidden(invoke: Any, monkeypatch: pytest.MonkeyPatch, form: list[str]) -> None:
    monkeypatch.setenv("CYGNET_API_KEY", "s3cret")
    output = invoke("config", "show", *form).output
    assert "s3cret" not in output
    assert "(hidden)" in output


def test_json_and_toml_exclude_each_other(invoke: Any) -> None:
    assert invoke("config", "show", "--json", "--toml").exit_code == 2
