"""What is pure in `kvjax.observe` imports no I/O, clock, log or JAX."""

from pathlib import Path

import pytest

from tests.test_import_rules import PURE, PURE_STDLIB, ROOT, imports, within

PURE_HERE = [
    "calls",
    "durations",
    "hash_units",
    "replay",
    "replay_counts",
    "replay_figures",
    "stats_fields",
    "trace_lines",
    "workloads",
]
MAY = [*(f"kvjax.{one}" for one in PURE), *(f"kvjax.observe.{one}" for one in PURE_HERE), "numpy", "bisect"]


@pytest.mark.parametrize("name", PURE_HERE)
def test_what_is_pure_imports_only_what_is(name):
    source = Path(ROOT / "kvjax" / "observe" / f"{name}.py").read_text(encoding="utf-8")
    assert [found for found in imports(source) if not within(found, [*MAY, *PURE_STDLIB])] == []
