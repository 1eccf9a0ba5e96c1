"""The layering table, as a test: which part of Cygnet may import which, and what pure parts must not touch.

A *unit* is a package (`kv`) or its runtime (`kv.runtime`). Pure units take state and time in and give decisions out;
whatever touches a device, clock, process, disk or socket is in a `runtime`. To add an edge, add it to `ALLOWED` and
say why.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "cygnet"

PURE_SIM = ("base", "metrics", "kv", "encoder", "gcache", "router", "engine")

ALLOWED: dict[str, tuple[str, ...]] = {
    "base": (),
    "metrics": ("base",),
    "kv": ("base",),
    # The KV runtime fills the tensors that a forward pass reads; it needs their types and nothing else of the models.
    "kv.runtime": ("base", "kv", "model.batch"),
    "model": ("base",),
    "encoder": ("base",),
    "encoder.runtime": ("base", "metrics", "encoder", "model"),
    "gcache": ("base", "metrics", "kv"),
    # The disk tier is the embedded disk store under other keys, and I/O threads are its team.
    "gcache.runtime": ("base", "metrics", "kv", "kv.runtime.disk_store", "kv.runtime.memory", "gcache"),
    # The router scores cached prefixes with the code that caches them, but owns no schedule.
    "router": ("base", "metrics", "kv"),
    "router.runtime": ("base", "metrics", "kv", "router"),
    "engine": ("base", "metrics", "kv", "encoder"),
    # The one place where policy, tensors and network meet.
    "engine.runtime": (*PURE_SIM, "model", "kv.runtime", "encoder.runtime", "gcache.runtime"),
    # The simulator runs the real pure halves and no runtime, so that it can own no policy.
    "sim": PURE_SIM,
    # The API reaches an engine through the protocol in base; of the models it needs text <-> tokens.
    "api": ("base", "metrics", "model.tokenizer"),
    "integrations": ("base", "metrics", "kv", "kv.runtime", "gcache", "gcache.runtime"),
    "cli": ("*",),
}
"""Unit -> units, or single modules, that it may import. `kv` means the pure half of kv; `version` is open to all."""

PURE = frozenset(("base", "metrics", "kv", "encoder", "gcache", "router", "engine", "sim"))

# fmt: off
IMPURE_MODULES = frozenset((
    "torch", "zmq", "socket", "ssl", "select", "selectors", "threading", "multiprocessing", "subprocess", "signal",
    "concurrent", "asyncio", "time", "http", "httpx", "httptools", "uvicorn", "uvloop", "fastapi", "starlette",
    "redis", "psutil",
))
# fmt: on
"""Outside modules by which a pure unit would get hold of a device, a clock, a process or a socket."""

CLOCK_CALLS = frozenset(("now", "utcnow", "today"))
"""`datetime.now()` and its kin: a clock without importing `time`."""


@dataclass(frozen=True)
class Imported:
    """One imported dotted name, and where the import stands."""

    name: str
    line: int


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def live_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `tree` that can run: everything but the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for branch in child.orelse:
                yield branch
                yield from live_nodes(branch)
        else:
            yield from live_nodes(child)


def imports_of(tree: ast.AST, module: str, is_package: bool, known: frozenset[str]) -> Iterator[Imported]:
    """What a module imports, at its top or inside a function, relative names resolved, `from a import b` told apart."""
    for node in live_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Imported(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                package = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Imported(full if full in known else base, node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Imported(node.args[0].value, node.lineno)


def unit_of(module: str) -> str:
    """`cygnet.kv.runtime.pools` -> `kv.runtime`, `cygnet.kv.tree` -> `kv`, `cygnet` -> ``."""
    parts = module.split(".")[1:]
    if len(parts) > 1 and parts[1] == "runtime":
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def may_import(unit: str, target: str) -> bool:
    """Whether code of `unit` may import the Cygnet module `target`."""
    target_unit, inner = unit_of(target), target.removeprefix("cygnet.")
    if target in ("cygnet", "cygnet.version") or target_unit == unit:
        return True
    for allowed in ALLOWED[unit]:
        if allowed in ("*", target_unit):
            return True
        if allowed not in ALLOWED and (inner == allowed or inner.startswith(allowed + ".")):
            return True
    return False


def check_module(file: Path, root: Path, known: frozenset[str]) -> Iterator[str]:
    """Violations in one file, as `file:line: reason`."""
    relative = file.relative_to(root.parent)
    is_package = file.name == "__init__.py"
    module = ".".join((relative.parent if is_package else relative.with_suffix("")).parts)
    unit = unit_of(module)
    if unit in ("", "version"):
        unit, pure = "base", True
    elif unit not in ALLOWED:
        yield f"{relative}:1: {unit!r} is in no row of the layering table"
        return
    else:
        pure = unit in PURE
    tree = ast.parse(file.read_text())
    for imported in imports_of(tree, module, is_package, known):
        where = f"{relative}:{imported.line}"
        if imported.name == "cygnet" or imported.name.startswith("cygnet."):
            target_unit = unit_of(imported.name)
            if target_unit not in ALLOWED and target_unit not in ("", "version"):
                yield f"{where}: imports {imported.name}, which is in no row of the layering table"
            elif not may_import(unit, imported.name):
                yield f"{where}: {unit} may not import {imported.name}"
        elif pure and imported.name.split(".")[0] in IMPURE_MODULES:
            yield f"{where}: {unit} is pure and may not import {imported.name}"
    if pure:
        for node in live_nodes(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCK_CALLS:
                yield f"{relative}:{node.lineno}: {unit} is pure and may not read a clock ({ast.unparse(node.func)})"


def check(root: Path) -> list[str]:
    """Every violation in the package at `root`."""
    files = sorted(file for file in root.rglob("*.py"))
    names = (file.parent if file.name == "__init__.py" else file.with_suffix("") for file in files)
    known = frozenset(".".join(name.relative_to(root.parent).parts) for name in names)
    return [violation for file in files for violation in check_module(file, root, known)]


def test_the_source_keeps_to_the_table() -> None:
    assert SOURCE.joinpath("base", "config.py").exists(), "the check looks at the wrong place"
    assert check(SOURCE) == []


def test_the_table_has_no_cycle() -> None:
    """A table that allowed a cycle would allow everything within it."""
    done: set[str] = set()

    def visit(unit: str, path: tuple[str, ...]) -> None:
        assert unit not in path, f"cycle: {' -> '.join((*path, unit))}"
        if unit not in done:
            for allowed in ALLOWED[unit]:
                if allowed != "*":
                    visit(allowed if allowed in ALLOWED else allowed.split(".")[0], (*path, unit))
            done.add(unit)

    for unit in ALLOWED:
        visit(unit, ())


def test_pure_units_are_allowed_no_runtime() -> None:
    for unit in PURE:
        assert not [allowed for allowed in ALLOWED[unit] if "runtime" in allowed or allowed in ("*", "model")]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A small package that keeps to the table."""
    root = tmp_path / "cygnet"
    files = {
        "__init__.py": "from cygnet.version import __version__\n",
        "version.py": "__version__ = '0'\n",
        "base/__init__.py": "",
        "base/ids.py": "import json\n",
        "kv/__init__.py": "",
        "kv/tree.py": "from cygnet.base import ids\nfrom . import pools\n",
        "kv/pools.py": "from datetime import timedelta\n",
        "kv/runtime/__init__.py": "",
        "kv/runtime/tensors.py": "import torch\nimport time\nfrom cygnet.model.batch import LayerKV\n",
        "model/__init__.py": "",
        "model/batch.py": "import torch\nLayerKV = 1\n",
        "model/loader.py": "",
        "model/tokenizer.py": "",
        "engine/__init__.py": "",
        "engine/core.py": "from cygnet.kv.tree import ids\n",
        "engine/runtime/__init__.py": "",
        "engine/runtime/loop.py": "from cygnet.kv.runtime import tensors\nfrom cygnet.model import loader\n",
        "api/__init__.py": "",
        "api/app.py": "from cygnet.model import tokenizer\n",
        "cli/__init__.py": "",
        "cli/main.py": "from cygnet.engine.runtime import loop\n",
    }
    for name, text in files.items():
        root.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        root.joinpath(name).write_text(text)
    return root


def test_a_clean_package_passes(planted: Path) -> None:
    assert check(planted) == []


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("base/bad.py", "from cygnet.kv import tree", "base may not import cygnet.kv.tree"),
        ("kv/bad.py", "import cygnet.engine.core", "kv may not import cygnet.engine.core"),
        ("kv/bad.py", "from cygnet.kv.runtime import tensors", "kv may not import cygnet.kv.runtime.tensors"),
        ("kv/bad.py", "from cygnet.kv import runtime", "kv may not import cygnet.kv.runtime"),
        ("kv/bad.py", "from .runtime import tensors", "kv may not import cygnet.kv.runtime.tensors"),
        ("kv/bad.py", "from ..engine import core", "kv may not import cygnet.engine.core"),
        ("kv/__init__.py", "from ..engine import core", "kv may not import cygnet.engine.core"),
        ("kv/bad.py", "def f():\n    from cygnet.model import batch", "kv may not import cygnet.model.batch"),
        ("kv/bad.py", "import importlib\nimportlib.import_module('cygnet.model')", "kv may not import cygnet.model"),
        ("kv/bad.py", "import torch.nn", "kv is pure and may not import torch.nn"),
        ("kv/bad.py", "def f():\n    import threading", "kv is pure and may not import threading"),
        ("engine/bad.py", "from time import monotonic_ns", "engine is pure and may not import time"),
        ("engine/bad.py", "import zmq", "engine is pure and may not import zmq"),
        ("base/bad.py", "import socket", "base is pure and may not import socket"),
        ("base/bad.py", "import datetime\nx = datetime.datetime.now()", "base is pure and may not read a clock"),
        ("version.py", "from cygnet.kv import tree", "base may not import cygnet.kv.tree"),
        ("engine/bad.py", "from cygnet.model import batch", "engine may not import cygnet.model.batch"),
        ("kv/runtime/bad.py", "from cygnet.model import loader", "kv.runtime may not import cygnet.model.loader"),
        ("kv/runtime/bad.py", "from cygnet.engine import core", "kv.runtime may not import cygnet.engine.core"),
        ("model/bad.py", "from cygnet.kv.runtime import tensors", "model may not import cygnet.kv.runtime.tensors"),
        ("api/bad.py", "from cygnet.model.loader import x", "api may not import cygnet.model.loader"),
        ("api/bad.py", "from cygnet.engine import core", "api may not import cygnet.engine.core"),
        ("engine/runtime/bad.py", "from cygnet.api import app", "engine.runtime may not import cygnet.api.app"),
        ("engine/runtime/bad.py", "from cygnet import cli", "engine.runtime may not import cygnet.cli"),
        ("extras/helpers.py", "", "'extras' is in no row of the layering table"),
        ("stray.py", "", "'stray' is in no row of the layering table"),
        ("cli/bad.py", "from cygnet.nowhere import x", "imports cygnet.nowhere, which is in no row"),
        (
            "kv/bad.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch",
            "kv is pure and may not import torch",
        ),
    ],
)
def test_a_planted_violation_is_found(planted: Path, file: str, code: str, reason: str) -> None:
    target = planted / file
    target.parent.mkdir(exist_ok=True)
    target.write_text(code + "\n")
    found = check(planted)
    assert len(found) == 1
    assert found[0].startswith(f"cygnet/{file}:")
    assert reason in found[0]


def test_imports_for_the_type_checker_are_free(planted: Path) -> None:
    (planted / "kv" / "typed.py").write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    import torch\n    from cygnet.engine.core import ids\n"
    )
    assert check(planted) == []
