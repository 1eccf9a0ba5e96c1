"""Interpreted kernels are tiny products in numpy and torch: more threads only cost."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, settings

from cygnet.model.kernels import triton_available

if not triton_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


# Shrinking a failure would take minutes here.
settings.register_profile("interpreted", deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("interpreted")
