"""What the documents show works as they say."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_example_for_operators_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (DOCS / "gcache.md").read_text(), re.DOTALL)
    assert code is not None
    run = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, timeout=60)
    lines = run.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["True", "True"], run.stderr
    assert lines[0].count("Outcome.OK") == 8


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
