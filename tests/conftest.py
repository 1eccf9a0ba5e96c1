"""Fixtures of more than one folder of tests."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from cygnet.base.threads import usable_cpus

if TYPE_CHECKING:
    from cygnet.model.source import ModelSource


@pytest.fixture(scope="session", autouse=True)
def _cache_apart() -> Iterator[None]:
    """Weights that tests assemble, in this process or in servers, are kept until the session's end, not in the user's
    cache. What takes long to make and is the same for all is taken from there: kernels, tokenizers, built-in models."""
    from cygnet.model.cache_dir import default_cache_dir

    real = default_cache_dir()
    with tempfile.TemporaryDirectory(prefix="cygnet-tests-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", name)
        default_cache_dir().mkdir()
        for shared in ("kernels", "models", "tokenizers"):
            with suppress(OSError):
                (real / shared).mkdir(parents=True, exist_ok=True)
                (default_cache_dir() / shared).symlink_to(real / shared)
        yield


@pytest.fixture(scope="module")
def all_threads() -> Iterator[None]:
    """All of this machine's compute threads: for real models."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: their matrices gain nothing from a second thread, and lose much where the cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
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
