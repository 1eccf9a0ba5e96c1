"""What the documents show works as they say."""

import re
import subprocess
import sys
from pathlib import Path

from cygnet.gcache.runtime.resp_commands import COMMANDS
from cygnet.kv.store import Outcome

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_example_for_operators_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (DOCS / "gcache.md").read_text(), re.DOTALL)
    assert code is not None
    run = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, timeout=60)
    lines = run.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["True", "True"], run.stderr
    assert lines[0].count("Outcome.OK") == 8


def test_the_example_of_its_doors_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", (DOCS / "gcache.md").read_text(), re.DOTALL)[1]
    known = "import fsspec; fsspec.register_implementation('gcache', 'cygnet.gcache.runtime.files.GCacheFileSystem')\n"
    run = subprocess.run([sys.executable, "-c", known + code], capture_output=True, text=True, timeout=60)
    lines = run.stdout.splitlines()
    assert lines[:2] == [str(4 << 20), str([Outcome.OK] * 3)], run.stderr
    assert sorted(lines[2:]) == [f"{place} {Outcome.OK}" for place in range(3)]


def test_every_command_of_redis_clients_is_described() -> None:
    text = (DOCS / "gcache.md").read_text()
    for command in COMMANDS:
        assert re.search(rf"\b{command.decode()}\b", text), command


def test_every_operation_is_described() -> None:
    from cygnet.gcache.protocol import Item, Op

    text = (DOCS / "gcache-protocol.md").read_text()
    for op in Op:
        assert f"| {op.value} {op.name} |" in text
    for item in Item:
        assert f"{item.value} {item.name.lower().replace('_', ' ')}" in text.replace("0 OK", "0 ok")


def test_every_metric_is_a_statistic() -> None:
    from cygnet.gcache.metrics import METRICS
    from support.gcache import server

    with server() as running:
        assert {metric.statistic for metric in METRICS} <= set(running.stats())
