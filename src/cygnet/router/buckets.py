"""Length buckets: groups of workers, each for prompts of a range of lengths."""

from collections.abc import Sequence
from itertools import pairwise

from cygnet.base.errors import ConfigError
from cygnet.router.policies import Limits

UNITS = {"K": 1024, "M": 1024 * 1024}


def parse_tokens(text: str) -> int:
    """`64K` -> 65536, `1M` -> 1048576, `500` -> 500."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not number.isdigit():
        raise ConfigError(f"length {text!r}: write tokens such as 64K, 1M or 5000")
    return int(number) * unit


def parse_buckets(items: Sequence[str]) -> Limits:
    """`["short=0-64K", "long=64K-256K"]` -> limits per group. Ranges include their lower end and must not overlap."""
    limits: Limits = {}
    for item in items:
        name, eq, span = item.partition("=")
        low, dash, high = span.partition("-")
        if not (eq and dash and name.strip()):
            raise ConfigError(f"length bucket {item!r} needs the form name=from-to, for example short=0-64K")
        bounds = parse_tokens(low.strip()), parse_tokens(high.strip())
        if bounds[0] >= bounds[1]:
            raise ConfigError(f"length bucket {item!r} is empty: {bounds[0]} is not below {bounds[1]} tokens")
        if name.strip() in limits:
            raise ConfigError(f"length bucket {name.strip()!r} is given twice")
        limits[name.strip()] = bounds
    ordered = sorted(limits.items(), key=lambda item: item[1])
    for (name, (_, high_a)), (other, (low_b, _)) in pairwise(ordered):
        if low_b < high_a:
            raise ConfigError(f"length buckets {name!r} and {other!r} overlap at {low_b} tokens")
    return limits
