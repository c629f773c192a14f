"""Pages and pictures that are made from the code are as the code makes them."""

import importlib.util
import json
import operator
import re
from dataclasses import MISSING, fields

import make
import pytest
from making.docstrings import arguments

import kvjax
import kvjax.serving.sglang_jax
import kvjax.serving.vllm
from kvjax.serving.vllm.options import Options


@pytest.mark.parametrize("name", make.MADE)
def test_made_files_are_up_to_date(name: str):
    assert (make.DOCS / name).read_text(encoding="utf-8") == make.MADE[name](), "run `python docs/make.py`"


def test_every_public_name_is_documented_once():
    page = (make.DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: kvjax\.(\S+)$", page, re.MULTILINE)
    modules = {"fused", "traced"}
    assert sorted(name for name in named if "." not in name and name not in modules) == sorted(kvjax.__all__)
    fused = {
        name for name, value in vars(kvjax.fused).items() if not name.startswith("_") and hasattr(value, "__qualname__")
    }
    assert {name.removeprefix("fused.") for name in named if name.startswith("fused.")} == fused
    traced = {
        name
        for name, value in vars(kvjax.traced).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == "kvjax.traced"
    }
    assert {name.removeprefix("traced.") for name in named if name.startswith("traced.")} == traced


# What kvjax makes and a caller only reads, or implements: these have no settings.
WITHOUT_SETTINGS = {
    *(
        "Chunking",
        "Decision",
        "FullAttention",
        "GroupStats",
        "Hit",
        "Job",
        "JobResult",
        "KVEvent",
        "LoadPlan",
        "Lookup",
    ),
    *("Recurrent", "Restorable", "Scratch", "Stats", "StorePlan", "TierStats"),
    *("fused.Arriving", "fused.Fetched", "fused.Step"),
    *("pool.LRU", "pool.Policy"),
    *("ranks.Channel", "ranks.RankLostError", "ranks.RanksDifferError", "ranks.RanksError"),
    *("tiers.Tier", "tiers.Usage"),
    "traced.StepMoves",
    *("tiers.TierError", "tiers.TierFullError", "tiers.TierTimeoutError", "tiers.TierUnavailableError"),
}


def test_all_that_a_caller_makes_has_its_settings_on_the_page():
    classes = {name for name in public_names() if isinstance(operator.attrgetter(name)(kvjax), type)}
    told = set(re.findall(r"^## `(\S+)`$", make.MADE["reference/configuration.md"](), re.MULTILINE))
    assert classes >= WITHOUT_SETTINGS
    assert sorted(classes - WITHOUT_SETTINGS) == sorted(told & classes)
    assert not told & WITHOUT_SETTINGS


def test_the_page_of_settings_has_all_keys_of_the_vllm_connector():
    part = make.MADE["reference/configuration.md"]().split("## vLLM")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", part, re.MULTILINE))
    assert rows.pop("host_bytes") == "required"
    defaults = {field.name: field.default for field in fields(Options) if field.default is not MISSING}
    assert {name: json.loads(default.strip("`")) for name, default in rows.items()} == {**defaults, "tiers": []}


def test_the_policy_of_deprecation_covers_all_of_the_reference():
    """What it calls public is there, and all that the reference lists is public."""
    policy = (make.DOCS / "deprecation.md").read_text(encoding="utf-8")
    public = policy.split("**Public** is:")[1].split("Texts of messages")[0]
    covered = [
        name.removeprefix("kvjax.") for name in re.findall(r"`(kvjax\.[\w.]+)`", public) if "serving" not in name
    ]
    assert covered
    for name in public_names():
        modules = [one for one in covered if name == one or name.startswith(f"{one}.")]
        assert name in kvjax.__all__ or len(modules) == 1, name
    for name in covered:
        assert operator.attrgetter(name)(kvjax), name


def test_the_policy_of_deprecation_names_adapters_that_are_there():
    policy = (make.DOCS / "deprecation.md").read_text(encoding="utf-8")
    (adapters,) = re.findall(r"^\* of the adapters(.*?);$\n\*", policy, re.DOTALL | re.MULTILINE)
    vllm, sglang_jax = adapters.split("for [sglang-jax]")
    assert set(re.findall(r"`(\w+)`", vllm)) == set(kvjax.serving.vllm._NAMES)
    names = re.findall(r"`(\w+)`", sglang_jax)
    assert [name for name in names if not callable(getattr(kvjax.serving.sglang_jax, name, None))] == []
    assert {"install", "groups_of", "MixedHostPool"} <= set(names)
    for module in re.findall(r"kvjax\.serving[\w.]*", adapters):
        assert importlib.util.find_spec(module), module


def public_names() -> list[str]:
    """All names of the API reference, without `kvjax.`; the module `fused` has an entry of its own."""
    page = (make.DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    return [name for name in re.findall(r"^::: kvjax\.(\S+)$", page, re.MULTILINE) if name != "fused"]


def test_arguments_are_read_from_docstrings():
    def documented(first, second):
        """Does something.

        Args:
            first: of two,
                on two lines.
            second: the other one.

        Raises:
            ValueError: it cannot.
        """

    assert arguments(documented) == {"first": "of two, on two lines.", "second": "the other one."}
