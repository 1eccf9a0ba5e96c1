"""Which attention backend and kernels a device gets, and what is said where Triton is missing."""

import pytest
import torch

from cygnet.base.errors import ConfigError
from cygnet.model import kernels, ops
from cygnet.model.attention import ATTENTION_BACKENDS, backend, select_backend
from cygnet.model.attention.numba_cpu import NumbaBackend
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.kernels.ops import TritonOps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "available", "chosen"),
    [(CPU, True, "torch"), (CPU, False, "torch"), (CUDA, False, "torch"), (CUDA, True, "triton")],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, device: torch.device, available: bool, chosen: str) -> None:
    made: list[str] = []
    monkeypatch.setattr(backend, "triton_available", lambda: available)
    monkeypatch.setattr("cygnet.model.cpu.kernels.numba_works", lambda: False)
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


def test_only_gpus_get_triton_step_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "triton_available", lambda: True)
    monkeypatch.setattr(ops, "require_triton", lambda: None)
    monkeypatch.setattr("cygnet.model.kernels.ops.triton_kernels", lambda: None)
    assert not isinstance(ops.select_ops("auto", CPU, torch.bfloat16), TritonOps)
    assert isinstance(ops.select_ops("auto", CUDA, torch.float64), ops.TorchOps)
    assert isinstance(ops.select_ops("auto", CUDA, torch.bfloat16), TritonOps)
    monkeypatch.setattr(ops, "triton_available", lambda: False)
    assert isinstance(ops.select_ops("auto", CUDA, torch.bfloat16), ops.TorchOps)


def test_cpus_keep_their_backend() -> None:
    assert isinstance(select_backend("auto", CPU), TorchBackend | NumbaBackend)
    assert "triton" in ATTENTION_BACKENDS
