"""What the server says about the model it serves."""

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Made by whoever loaded the model (the CLI)."""

    id: str
    """Name in the API."""
    created: int
    """Unix time, seconds."""
    owned_by: str = "cygnet"
    root: str = ""
    """Where the weights came from: a path, a hub id or a built-in name."""
    description: str = ""
    kind: Literal["base", "instruct"] = "instruct"
    """A `base` model continues text and is not trained to chat; the page shows completions first and says so (in the
    words of `description`, where there is one)."""
