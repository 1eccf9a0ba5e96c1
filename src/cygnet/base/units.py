"""Reading and printing byte sizes: `2GiB`, `512MB`, `1.5G`, or a plain number of bytes."""

import re

from cygnet.base.errors import ConfigError

_FACTORS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Bytes meant by `text`; a bare `K/M/G/T` is binary. Raises `ConfigError` with examples on anything else."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _FACTORS:
        raise ConfigError(f"can't read {text!r} as a size; write for example 2GiB, 512MiB or 1073741824")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` in binary units with three significant digits, such as `1.50 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            # `.3g` alone would write 1000 as 1e+03
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
