"""Tiny models, built and saved once per session."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.utils import logging

from model.harness import FolderCheckpoint
from model.tiny import FAMILIES, Tiny


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    """Tiny products are slower on several threads, much so beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """`tiny_model("gemma3")`: see `tiny.FAMILIES` for the names."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            oracle = FAMILIES[name]()
            folder = tmp_path_factory.mktemp(name)
            oracle.save_pretrained(folder)
            made[name] = Tiny(oracle, FolderCheckpoint(folder))
        return made[name]

    return get
