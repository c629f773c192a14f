"""Makes the examples in docstrings, which are doctests, blocks of code in the API reference."""

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]  # of the extra `docs`

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)


class FencedDoctests(griffe.Extension):
    """Puts a fence around each example of every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
