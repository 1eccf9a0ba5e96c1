"""Cygnet: inference serving for hybrid sliding-window language models. See docs/architecture.md."""

from cygnet.version import __version__

__all__ = ["__version__"]
