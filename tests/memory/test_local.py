"""What a process holds of an array that several processes hold together."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvjax.memory.local import _joined, all_parts_are_boxes


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


@pytest.mark.parametrize(
    ("processes", "together"),
    [
        ([0, 0, 1, 1], True),
        ([1, 1, 0, 0], True),
        ([0, 1, 0, 1], False),
        ([0, 1, 1, 0], False),
        ([[0, 1], [0, 1]], True),
        ([[0, 1], [1, 0]], False),
        ([[0, 0, 1], [0, 0, 2]], True),
        ([[0, 0], [0, 1]], False),
    ],
)
def test_processes_whose_devices_do_not_stand_together_are_told_by_all(processes, together):
    """JAX makes no part of a mesh for a process whose devices are no box in it, and says so in that process alone."""
    devices = np.empty(np.shape(processes), object)
    for place, process in np.ndenumerate(processes):
        devices[place] = SimpleNamespace(process_index=process)
    assert all_parts_are_boxes(devices) is together
