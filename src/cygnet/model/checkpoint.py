"""What the model loader needs of a checkpoint, whatever its file format."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


StoredTensor = tuple[str, "Tensor", int]
"""A Hugging Face name, the tensor on the CPU, and its bytes as stored."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


class Checkpoint(Protocol):
    """A model's config and weights, both in Hugging Face's names and conventions.

    A GGUF file is translated on the fly: its metadata into the config.json of its architecture, its tensors into
    Hugging Face names, layout and value conventions. So a family's file knows one naming only.
    """

    @property
    def config(self) -> dict[str, Any]:
        """The (text) model's config.json."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored, for progress."""

    @property
    def identity(self) -> str:
        """What changes whenever any of the tensors does: the files they are read from, and how they are read."""

    @property
    def is_quantised(self) -> bool:
        """Whether values are computed, which takes longer than to read them from a file that has them ready."""

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield each tensor once; bf16 or fp32, but for the packed parts of a quantisation that the family unpacks."""
