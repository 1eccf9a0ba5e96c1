"""The tokens of what a benchmark asks, made from a seed alone, so that two runs ask the same."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from cygnet.sim.sessions import Piece

FIRST_TOKEN = 1000
"""Random token ids start here: below lie the special and byte tokens of the usual vocabularies."""

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend father power hour game line end member
law car city name team minute idea body back parent face level office door health person art war history party result
change morning reason research girl guy moment air teacher force
"""
_WORDS = tuple(_COMMON.split())


class TokenSource:
    """Makes the tokens of pieces. Token ids lie in `FIRST_TOKEN <= id < vocab_size`."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        import numpy

        if vocab_size <= FIRST_TOKEN:
            raise ValueError(f"vocab_size must be above {FIRST_TOKEN}, got {vocab_size}")
        self._numpy, self._seed, self._vocab_size = numpy, seed, vocab_size
        self._of_key = lru_cache(maxsize=4096)(self._make)

    def token_ids(self, pieces: Sequence[Piece]) -> list[int]:
        """The tokens of all pieces, in order."""
        return [token for piece in pieces for token in self._of_key(piece.key, piece.length)]

    def text(self, pieces: Sequence[Piece]) -> str:
        """The same prompt for a server that takes no token ids: common words, about one token each."""
        return "".join(f" {_WORDS[token % len(_WORDS)]}" for token in self.token_ids(pieces))

    def _make(self, key: str, length: int) -> list[int]:
        digest = hashlib.blake2b(f"{self._seed}/{key}".encode(), digest_size=8).digest()
        generator = self._numpy.random.Generator(self._numpy.random.PCG64(int.from_bytes(digest, "little")))
        floats = generator.random(length)  # one draw per token, so a prefix does not depend on the length
        return (FIRST_TOKEN + (floats * (self._vocab_size - FIRST_TOKEN)).astype("int64")).tolist()  # type: ignore[no-any-return]
