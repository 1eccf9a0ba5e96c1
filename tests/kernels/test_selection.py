"""Which attention backend and kernels a device gets, and what is said where Triton is missing."""

import pytest
import torch

from cygnet.base.errors import ConfigError
from cygnet.model import kernels
from cygnet.model.attention import ATTENTION_BACKENDS, backend, select_backend
from cygnet.model.attention.torch_cpu import TorchBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "available", "chosen"),
    [(CPU, True, "torch"), (CPU, False, "torch"), (CUDA, False, "torch"), (CUDA, True, "triton")],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, device: torch.device, available: bool, chosen: str) -> None:
    made: list[str] = []
    monkeypatch.setattr(backend, "triton_available", lambda: available)
    monkeypatch.setattr(ATTENTION_BACKENDS, "get", lambda name: lambda: made.append(name))
    select_backend("auto", device)
    assert made == [chosen]


def test_missing_triton_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "triton_available", lambda: False)
    with pytest.raises(ConfigError, match=r"package triton, which is not installed; .*cygnet\[gpu\]"):
        select_backend("triton", CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "triton_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="need a GPU, and torch sees none here"):
        select_backend("triton", CPU)


def test_cpus_and_fp64_keep_the_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "triton_available", lambda: True)
    monkeypatch.setattr(kernels, "triton_kernels", lambda: "kernels")
    assert kernels.kernels_for(CPU, torch.bfloat16) is None
    assert kernels.kernels_for(CUDA, torch.float64) is None
    assert kernels.kernels_for(CUDA, torch.bfloat16) == "kernels"
    monkeypatch.setattr(kernels, "triton_available", lambda: False)
    assert kernels.kernels_for(CUDA, torch.bfloat16) is None


def test_the_default_backend_is_unchanged() -> None:
    assert isinstance(select_backend("auto", CPU), TorchBackend)
    assert "triton" in ATTENTION_BACKENDS
