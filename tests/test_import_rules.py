"""Who may import whom. Arithmetic knows no JAX, I/O, clock or log; nothing imports the command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = [
    "_arguments",
    "_checks",
    "_intervals",
    "_resident",
    "_search",
    "accounting",
    "admission",
    "capacity",
    "chain",
    "checkpoints",
    "chunking",
    "coverage",
    "decision",
    "explain",
    "geometry",
    "groups",
    "handles",
    "keys",
    "law",
    "ledger",
    "loading",
    "lookups",
    "models",
    "packing",
    "plan",
    "pool",
    "positions",
    "promotions",
    "requests",
    "retention",
    "stores",
    "storing",
]
PURE_STDLIB = {
    "bisect",
    "collections",
    "dataclasses",
    "fractions",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "operator",
}
PURE_STDLIB |= {"re", "reprlib", "struct", "typing", "weakref"}
JAX_LIVES_IN = ["fused", "jobs", "memory", "mover", "offloader", "traced"]
# Of the command line, only what times or looks at devices; `kvjax.cli.main` loads it when it is asked for.
JAX_COMMANDS = (
    "kvjax.cli.bench_miss",
    "kvjax.cli.bench_moves",
    "kvjax.cli.bench_tiers_promote",
    "kvjax.cli.doctor",
)


def imports(source: str) -> list[str]:
    """Full names of all modules that a source imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(name: str, allowed: list[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


def breaches(module: str, source: str) -> list[str]:
    """What `module` (dotted) imports and must not."""
    found = imports(source)
    part = module.split(".")[1] if module.startswith("kvjax.") else ""
    wrong = []
    for name in found:
        if module.startswith("pallas_kernels") and within(name, ["kvjax"]):
            wrong.append(name)
        if part in PURE:
            pure = [f"kvjax.{one}" for one in PURE] + ["numpy", "ml_dtypes", *PURE_STDLIB]
            if not within(name, pure):
                wrong.append(name)
        if within(name, ["kvjax.cli", "kvjax.serving"]) and part not in ("cli", "serving", "__main__"):
            wrong.append(name)
        if (
            within(name, ["jax", "jaxlib", "pallas_kernels"])
            and module.startswith("kvjax")
            and part not in JAX_LIVES_IN
            and not module.startswith(JAX_COMMANDS)
        ):
            wrong.append(name)
        if within(name, ["os.environ", "os.getenv"]) and part not in ("cli", "serving"):
            wrong.append(name)
    return sorted(set(wrong))


def sources() -> list[Path]:
    return sorted([*(ROOT / "kvjax").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_it_may(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert breaches(module, path.read_text(encoding="utf-8")) == []


def test_the_list_of_pure_modules_is_that_of_the_files():
    names = {path.stem if path.parent.name == "kvjax" else path.parent.name for path in (ROOT / "kvjax").rglob("*.py")}
    other = {*JAX_LIVES_IN, "_files", "cli", "configs", "observe", "serving", "sglang_jax", "stats", "tiers", "__init__", "__main__"}
    assert names == {*PURE, *other}


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("kvjax.coverage", "import jax", ["jax"]),
        ("kvjax.pool.lru", "def f():\n    from jax import numpy", ["jax.numpy"]),
        ("kvjax.plan", "import time", ["time"]),
        ("kvjax.ledger", "import logging", ["logging"]),
        ("kvjax.keys", "from pathlib import Path", ["pathlib.Path"]),
        ("kvjax.ledger", "from kvjax.mover import Mover", ["kvjax.mover.Mover"]),
        ("kvjax.offloader", "from kvjax.cli.main import main", ["kvjax.cli.main.main"]),
        ("kvjax.observe.progress", "import jax.numpy as jnp", ["jax.numpy"]),
        ("kvjax.mover", "from os import environ", ["os.environ"]),
        ("kvjax.cli.bench_hit", "import jax", ["jax"]),
        ("pallas_kernels.dispatch", "from kvjax import groups", ["kvjax.groups"]),
        ("kvjax.coverage", "import numpy as np\nfrom kvjax.groups import Kind", []),
    ],
)
def test_a_planted_breach_is_found(module, source, wrong):
    assert breaches(module, source) == wrong


@pytest.mark.parametrize("module", ["kvjax", "kvjax.ledger", "kvjax.cli.main"])
def test_a_scheduler_and_the_command_line_load_no_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
