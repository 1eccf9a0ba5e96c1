"""Partitions, in network namespaces under load: `benchmarks/gcache_faults.py` on the faults that need a network.

What is late or fails is left to `--check`: a busy machine changes it. Wrong and lost bytes are judged here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    from gcache_faults import Row, check
    from gcache_hosts import why_not
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
def test_partitions_cost_no_object_and_no_byte_is_wrong(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    report = tmp_path / "report.json"
    script = str(BENCHMARKS / "gcache_faults.py")
    run = subprocess.run(
        [sys.executable, script, "--quick", "--only", "partitions", "--grace", "600", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    rows = {row["what"]: row for row in json.loads(report.read_text())["rows"]}
    assert set(rows) == {"cut off from all", "cut off from clients", "cut off from etcd", "cut off from another server"}
    for what, row in rows.items():
        assert row["operations"] > 0
        assert (row["wrong"], row["hits"]) == (0, 1.0), (what, run.stderr)
    assert rows["cut off from all"]["radius"] > 0, "no cable was pulled"


def good() -> list[Row]:
    return [
        Row("server frozen", operations=9, failed=3, radius=1.0, late_ms=4.0, hits=1.0),
        Row("3 of 3 etcd killed", operations=9, hits=1.0),
        Row("cut off for longer than the grace", operations=9, failed=2, radius=0.9, hits=0.7),
        Row("server drained", operations=9, hits=1.0, lost=0),
    ]


@pytest.mark.parametrize(
    ("at", "name", "value", "missed"),
    [
        (0, "wrong", 1, "wrong_max"),
        (1, "foreign", 1, "foreign_max"),
        (0, "radius", 1.1, "radius_max"),
        (2, "late_ms", 6.0, "late_max_ms"),
        (0, "hits", 0.98, "hits_min"),
        (3, "lost", 1, "lost_max"),
        (1, "failed", 1, "etcd_failed_max"),
    ],
)
def test_a_missed_target_is_found(
    at: int, name: str, value: float, missed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = good()
    assert check(rows) == 0
    assert "MISSED" not in capsys.readouterr().out
    setattr(rows[at], name, value)
    assert check(rows) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("MISSED")] == [f"{missed}:"]
