"""What importing costs: neither JAX for who plans, nor anything optional for who moves bytes."""

import re
import subprocess
import sys

import pytest

import kvjax
from tests.cli.command import kvjax as command
from tests.support.pages import ROOT

HEAVY = ("flax", "matplotlib", "prometheus_client", "redis", "tensorstore", "torch", "transformers")
PROGRAMS = {
    "kvjax": ("import kvjax", ("jax", "rich", *HEAVY)),
    "kvjax.cli.main": ("import kvjax.cli.main", ("jax", *HEAVY)),
    "kvjax.Ledger": ("from kvjax import Ledger", ("jax", "rich", *HEAVY)),
    "kvjax.tiers": ("from kvjax.tiers import open_tier", ("jax", *HEAVY)),
    "kvjax.Offloader": ("from kvjax import Mover, Offloader, fused", HEAVY),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_importing_loads_nothing_heavy(name: str):
    program, heavy = PROGRAMS[name]
    code = f"{program}; import sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["fused.FusedSteps", "ranks.RanksError"])
def test_modules_that_need_jax_are_attributes_that_are_imported_when_used(name: str):
    code = f"import sys, kvjax; assert 'jax' not in sys.modules; print(kvjax.{name}.__name__, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{name.split('.')[1]} True\n"
    assert name.split(".")[0] in dir(kvjax)


def test_names_that_are_not_there_are_refused():
    with pytest.raises(AttributeError, match="module 'kvjax' has no attribute 'no_such_name'"):
        _ = kvjax.no_such_name


def test_the_version_is_stated_once():
    assert command("--version").out == f"kvjax {kvjax.__version__}\n"
    stated = [path for path in (ROOT / "kvjax").rglob("*.py") if re.search(r"^__version__ = ", path.read_text(), re.M)]
    assert [path.name for path in stated] == ["__init__.py"]
    assert "version" not in re.findall(r"^(\w+) = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_what_kvjax_imports_for_others_is_public():
    source = (ROOT / "kvjax" / "__init__.py").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^ *from kvjax\.\S+ import (\w+) as", source, re.MULTILINE)) == sorted(kvjax.__all__)


def test_all_public_names_are_there():
    for name in kvjax.__all__:
        assert getattr(kvjax, name).__doc__, name


def test_a_star_import_brings_what_moves_bytes():
    names: dict[str, object] = {}
    exec("from kvjax import *", names)
    assert names["Offloader"] is kvjax.Offloader
