"""Fixtures of more than one folder of tests."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cygnet.base.threads import usable_cpus

if TYPE_CHECKING:
    from cygnet.model.source import ModelSource


@pytest.fixture(scope="module")
def all_threads() -> Iterator[None]:
    """All of this machine's compute threads: for real models."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gemma_source() -> "ModelSource":
    """The real Gemma 3 270M; skips without its weights."""
    from cygnet.base.errors import ModelLoadError
    from cygnet.model.source import find_model

    try:
        return find_model("gemma3-270m")
    except ModelLoadError as error:
        pytest.skip(f"needs the gemma extra: {error}")
