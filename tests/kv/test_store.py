"""Keys and specs of stores, and the fake, which passes the contract that real stores pass."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from contracts.store import CHECKS
from cygnet.base.errors import ConfigError
from cygnet.base.geometry import GroupGeometry, KVGeometry
from cygnet.base.ids import BlockKey
from cygnet.kv.runtime.stores import open_store
from cygnet.kv.store import OBJECT_KEY_BYTES, Group, namespace_of, object_key, object_keys, split_spec
from fakes.store import MemoryStore

GEMMA = KVGeometry(GroupGeometry(3, 1, 256, 256, 2), GroupGeometry(15, 1, 256, 256, 2, 511))
BLOCK = BlockKey(bytes(range(16)))


@contextmanager
def make(capacity: int = 64 << 20) -> Iterator[MemoryStore]:
    yield MemoryStore(capacity)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_fake_keeps_the_contract(check: Any) -> None:
    check(make)


def test_a_namespace_tells_apart_all_that_bytes_depend_on() -> None:
    swa = GEMMA.swa
    others = [
        namespace_of("gemma", GEMMA, 16, "bfloat16"),
        namespace_of("gemmb", GEMMA, 16, "bfloat16"),
        namespace_of("gemma", GEMMA, 32, "bfloat16"),
        namespace_of("gemma", GEMMA, 16, "float16"),
        namespace_of("gemma", GEMMA, 16, "bfloat16", shard="tp0/2"),
        namespace_of("gemma", GEMMA, 16, "bfloat16", shard="tp1/2"),
        namespace_of("gemma", GEMMA, 16, "bfloat16", layout=2),
        *(
            namespace_of("gemma", KVGeometry(GEMMA.full, changed), 16, "bfloat16")
            for changed in (
                replace(swa, num_layers=14),
                replace(swa, num_kv_heads=2),
                replace(swa, key_dim=192),
                replace(swa, value_dim=128),
                replace(swa, window=512),
            )
        ),
        namespace_of("gemma", KVGeometry(replace(GEMMA.full, num_layers=4), swa), 16, "bfloat16"),
        namespace_of("gemma", GEMMA, 16, "bfloat161", layout=1),
    ]
    assert len(set(others)) == len(others)


def test_keys_are_the_same_for_ever() -> None:
    """They name what is on disks and in other processes: changing these strings loses every cache there is."""
    namespace = namespace_of("gemma3-270m", GEMMA, 16, "bfloat16")
    assert namespace.hex() == "f47b066089bf5c3dbbff11cbcf7a987b"
    key = object_key(namespace, Group.SWA, BLOCK)
    assert key.hex() == namespace.hex() + "01" + "000102030405060708090a0b0c0d0e0f"
    assert len(key) == OBJECT_KEY_BYTES
    assert object_keys(namespace, Group.SWA, [BLOCK, BLOCK]) == [key, key]
    assert object_key(namespace, Group.FULL, BLOCK) != key


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from cygnet.base.geometry import *; from cygnet.kv.store import *;"
        "g = KVGeometry(GroupGeometry(3, 1, 256, 256, 2), GroupGeometry(15, 1, 256, 256, 2, 511));"
        "print(namespace_of('m', g, 16, 'bfloat16').hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {namespace_of("m", GEMMA, 16, "bfloat16").hex() + "\n"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("disk:/data/kv:20GiB", ("disk", "/data/kv:20GiB")),
        ("disk:kv", ("disk", "kv")),
        ("/data/kv:20GiB", ("disk", "/data/kv:20GiB")),
        ("./kv", ("disk", "./kv")),
        ("kv", ("disk", "kv")),
        ("~/kv:1GiB", ("disk", "~/kv:1GiB")),
        ("cache/kv:1GiB", ("disk", "cache/kv:1GiB")),
    ],
)
def test_specs(spec: str, expected: tuple[str, str]) -> None:
    assert split_spec(spec) == expected


@pytest.mark.parametrize("spec", ["nowhere:somewhere", "dsik:/data", "kv:20GiB", ""])
def test_specs_that_name_no_store(spec: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        open_store(spec)
