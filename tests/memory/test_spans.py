"""Spans are copied as a plain loop would copy them, whatever their lengths and places."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.memory import spans
from kvjax.memory.spans import address_of, copy_spans

SIZE = 1 << 20


def place(rng: np.random.Generator, lengths: np.ndarray, kind: str, align: int) -> np.ndarray:
    """Where spans lie in `SIZE` bytes without touching: in order, at even distances, or anywhere."""
    order = np.arange(len(lengths)) if kind != "anywhere" else rng.permutation(len(lengths))
    room = SIZE - int(lengths.sum()) - align
    gap = 0 if kind == "run" else max(0, room // len(lengths)) // align * align
    starts, at = np.empty(len(lengths), np.int64), 0
    for i in order:
        starts[i] = at
        skip = gap if kind == "even" else int(rng.integers(0, gap // align + 1)) * align if gap else 0
        at += int(lengths[i]) + skip
    return starts + int(rng.integers(0, align))


def check(dst_starts: np.ndarray, src_starts: np.ndarray, lengths: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, 256, (2, SIZE), np.uint8)
    expected, source = dst.copy(), src.copy()
    for d, s, n in zip(dst_starts, src_starts, lengths, strict=True):
        expected[d : d + n] = src[s : s + n]
    copy_spans(dst_starts + address_of(dst), src_starts + address_of(src), lengths)
    assert np.array_equal(dst, expected)
    assert np.array_equal(src, source)


@pytest.mark.parametrize("to", ["run", "even", "anywhere"])
@pytest.mark.parametrize("of", ["run", "even", "anywhere"])
@pytest.mark.parametrize("length", [1, 13, 512, 1024, 4096, 5120, 16384])
def test_equal_spans(to, of, length):
    rng = np.random.default_rng(length)
    lengths = np.full(min(200, SIZE // 2 // length), length, np.int64)
    check(place(rng, lengths, to, 64), place(rng, lengths, of, 64), lengths, 1)


@given(st.data())
def test_spans_of_any_lengths(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    unit = data.draw(st.sampled_from([1, 4, 256, 1024, 4096]))
    lengths = rng.integers(1, 6, data.draw(st.integers(0, 30))) * unit
    to, of = data.draw(st.sampled_from(["run", "even", "anywhere"])), data.draw(st.sampled_from(["run", "anywhere"]))
    if len(lengths):
        check(place(rng, lengths, to, unit), place(rng, lengths, of, unit), lengths, 2)


def test_long_spans_and_none():
    copy_spans(*(np.empty(0, np.int64),) * 3)
    lengths = np.array([300_000, 300_000], np.int64)
    check(np.array([400_000, 0]), np.array([7, 500_001]), lengths, 3)


@pytest.mark.parametrize(
    ("to", "of", "length", "way"),
    [
        ("run", "anywhere", 16384, "_copy_to_runs"),
        ("anywhere", "run", 16384, "_copy_from_runs"),
        ("anywhere", "anywhere", 4096, "_copy_by_buffer"),
        ("anywhere", "anywhere", 1000, "_copy_one_by_one"),
    ],
)
def test_each_way_is_taken(monkeypatch, to, of, length, way):
    taken = []
    for name in ("_copy_to_runs", "_copy_from_runs", "_copy_by_buffer", "_copy_one_by_one"):
        copy = getattr(spans, name)

        def watched(*args, name=name, copy=copy):
            result = copy(*args)
            if result is not False:
                taken.append(name)
            return result

        monkeypatch.setattr(spans, name, watched)
    rng = np.random.default_rng(0)
    lengths = np.full(20, length, np.int64)
    align = 1 if length % 1024 else length
    check(place(rng, lengths, to, align), place(rng, lengths, of, align), lengths, 4)
    assert taken == [way]
