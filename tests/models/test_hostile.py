"""Whatever a config holds, it is read or refused in one sentence, soon, and left as it was."""

import copy
import random
import time

import pytest

from kvjax.models import model_cache
from tests.models import published

HUB = sorted(path.stem for path in published.HUB.glob("*.json"))
VALUES = [
    *(None, True, False, -1, 0, 1, 3, 10**9, 10**15, 10**30, 1.5, float("nan"), float("inf"), "", "x", "F" * 500, b"x"),
    *(
        [],
        [1],
        [None],
        [[1]],
        [-1],
        ["full_attention"],
        ["x"] * 5,
        [0] * 10_000,
        {},
        {"a": 1},
        {1: 2},
        {"5": {"x": []}},
    ),
]


def paths(config, before=()):
    for name, value in config.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


def changed(config, path, value):
    found = copy.deepcopy(config)
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    if value is VALUES:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


@pytest.mark.parametrize("model", HUB)
def test_any_value_of_any_field_is_read_or_refused_in_one_sentence(model):
    rng = random.Random(model)
    config = published.hub(model)
    for path in paths(config):
        for value in [VALUES, *rng.sample(VALUES, 2)]:
            given = changed(config, path, value)
            before = repr(given)
            start = time.perf_counter()
            said = refusal_of(given)
            assert "\n" not in said, (path, value)
            assert len(said) < 700, (path, value)
            assert repr(given) == before, (path, value)
            assert time.perf_counter() - start < 20, (path, value)  # not a measurement: nothing may run away


def refusal_of(config):
    try:
        model_cache(config)
    except ValueError as error:
        return str(error)
    return ""


def test_fields_that_are_no_text_are_ignored():
    config = published.hub("llama-3.1-8b")
    assert model_cache(config | {7: 8, None: 9, ("sliding_window",): 4}) == model_cache(config)
