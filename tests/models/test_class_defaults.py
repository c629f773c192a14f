"""The defaults of config classes that kvjax carries are those of the classes."""

from pathlib import Path

import pytest

import kvjax.models.class_defaults as carried
from tests.models import make_class_defaults


def test_the_table_is_what_its_script_writes():
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != carried.TRANSFORMERS:
        pytest.skip(f"the table is that of transformers {carried.TRANSFORMERS}; other versions may have other classes")
    assert Path(carried.__file__).read_text(encoding="utf-8") == make_class_defaults.text()


def test_every_field_in_it_is_known_to_some_rule():
    listed = {field for fields in carried.CLASS_DEFAULTS.values() for field in fields}
    assert listed <= make_class_defaults.FIELDS
    source = "".join(path.read_text(encoding="utf-8") for path in Path(carried.__file__).parent.glob("*.py"))
    source += '"swa_head_dim"' * source.count('f"swa_{field}"')
    unread = {field for field in listed if source.count(f'"{field}"') <= len(_models_with(field))}
    assert unread == set()


def _models_with(field):
    return [name for name, fields in carried.CLASS_DEFAULTS.items() if field in fields]
