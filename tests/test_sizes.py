"""Small units: a module fits a head and a function fits a screen. Longer ones are split, not exempted."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "cygnet"
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 80


def oversized(root: Path) -> list[str]:
    """Modules and functions below `root` that are too long, each with its length."""
    found = []
    for file in sorted(root.rglob("*.py")):
        text, name = file.read_text(), file.relative_to(root)
        num_lines = len(text.splitlines())
        if num_lines > MAX_MODULE_LINES:
            found.append(f"{name}: {num_lines} lines, at most {MAX_MODULE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def test_modules_and_functions_are_small() -> None:
    assert SOURCE.joinpath("base", "config.py").exists(), "the check looks at the wrong place"
    assert oversized(SOURCE) == []


def test_long_ones_are_found(tmp_path: Path) -> None:
    def function(lines: int, head: str = "def f():") -> str:
        return head + "\n" + "    pass\n" * (lines - 1)

    (tmp_path / "fits.py").write_text(
        function(MAX_FUNCTION_LINES) + "x = 1\n" * (MAX_MODULE_LINES - MAX_FUNCTION_LINES)
    )
    assert oversized(tmp_path) == []

    (tmp_path / "long.py").write_text("x = 1\n" * (MAX_MODULE_LINES + 1))
    (tmp_path / "method.py").write_text("class C:\n    def f(self):\n" + "        pass\n" * MAX_FUNCTION_LINES)
    (tmp_path / "waits.py").write_text(function(MAX_FUNCTION_LINES + 1, "async def f():"))
    assert oversized(tmp_path) == [
        f"long.py: {MAX_MODULE_LINES + 1} lines, at most {MAX_MODULE_LINES}",
        f"method.py:2: f has {MAX_FUNCTION_LINES + 1} lines, at most {MAX_FUNCTION_LINES}",
        f"waits.py:1: f has {MAX_FUNCTION_LINES + 1} lines, at most {MAX_FUNCTION_LINES}",
    ]
