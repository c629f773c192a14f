"""Pages and pictures that are made from the code are as the code makes them."""

import re

import make
import pytest
from making.docstrings import arguments

import kvjax


@pytest.mark.parametrize("name", make.MADE)
def test_made_files_are_up_to_date(name: str):
    assert (make.DOCS / name).read_text(encoding="utf-8") == make.MADE[name](), "run `python docs/make.py`"


def test_every_public_name_is_documented_once():
    page = (make.DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: kvjax\.(\S+)$", page, re.MULTILINE)
    assert sorted(name for name in named if "." not in name and name != "fused") == sorted(kvjax.__all__)
    fused = {
        name for name, value in vars(kvjax.fused).items() if not name.startswith("_") and hasattr(value, "__qualname__")
    }
    assert {name.removeprefix("fused.") for name in named if name.startswith("fused.")} == fused


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
