"""A name for a model's weights that is the same on every machine that has the same files."""

from hashlib import blake2b
from pathlib import Path

HEAD_BYTES = 1 << 20
SAMPLE_BYTES = 4096
NUM_SAMPLES = 512
_WEIGHTS = ("*.safetensors", "config.json", "*.index.json")


def weights_digest(path: Path) -> str:
    """Hex digest of a GGUF file, or of the weights and config in a Hugging Face folder.

    It is made of names, sizes, heads, and `NUM_SAMPLES` samples of `SAMPLE_BYTES` evenly over each file, so that a
    checkpoint of hundreds of GB takes a second. Training moves nearly all weights, so two checkpoints that differ are
    told apart; a file patched by hand in a few places may not be.
    """
    digest = blake2b(digest_size=16, person=b"cygnet.weights")
    files = [path] if path.is_file() else sorted({file for pattern in _WEIGHTS for file in path.glob(pattern)})
    for file in files:
        name, size = ("" if file == path else file.name).encode(), file.stat().st_size
        digest.update(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little"))
        with file.open("rb") as content:
            digest.update(content.read(HEAD_BYTES))
            for index in range(NUM_SAMPLES):
                content.seek(index * size // NUM_SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()
