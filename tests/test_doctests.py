import doctest
import importlib

import pytest

MODULES = (
    *(
        "_checks",
        "accounting",
        "checkpoints",
        "chunking",
        "cli.model_options",
        "cli.options",
        "cli.plan_costs",
        "cli.render",
    ),
    *(
        "configs",
        "coverage",
        "explain",
        "fused",
        "fused.host",
        "geometry",
        "groups",
        "keys",
        "law",
        "models.equalize",
        "packing",
        "plan",
    ),
    *("observe.hash_units", "positions", "retention", "traced"),
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    assert (
        doctest.testmod(importlib.import_module(f"kvjax.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
    )


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(f"kvjax.{name}") for name in MODULES]
    assert sum(len(found.examples) for module in modules for found in finder.find(module)) >= 4
