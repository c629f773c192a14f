"""What a process holds of an array that several processes hold together."""

import pytest

from kvjax.memory.local import _joined


@pytest.mark.parametrize(
    ("spans", "joined"),
    [
        ([(0, 4)], ((0, 4),)),
        ([(4, 8), (0, 4)], ((0, 8),)),
        ([(0, 2), (2, 4), (6, 8), (4, 5)], ((0, 5), (6, 8))),
        ([], ()),
    ],
)
def test_pieces_that_touch_are_one_however_devices_cut_them(spans, joined):
    """The name of a shard is made of them: processes that hold the same find each other's chunks."""
    assert _joined(spans) == joined
