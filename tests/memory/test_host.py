import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.memory import host
from kvjax.memory.host import HostMemory
from kvjax.memory.limits import AvailableMemory, GroupLimit


@given(st.data())
def test_units_come_back_as_they_were_written_and_others_are_untouched(data):
    num_units = data.draw(st.integers(1, 20))
    memory = HostMemory(num_units, 12, show_progress=False)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    model = np.zeros((num_units, 3), np.uint32)
    for _ in range(4):
        count = data.draw(st.integers(0, num_units))
        ids = rng.permutation(num_units)[:count].astype(np.int32)
        rows = rng.integers(0, 2**32, (count, 3), np.uint32)
        memory.write(ids, rows)
        model[ids] = rows
        read = np.full((num_units + 1, 3), 7, np.uint32)
        memory.read(np.arange(num_units, dtype=np.int32), read)
        assert np.array_equal(read[:-1], model)
        assert (read[-1] == 7).all()


def test_a_pool_larger_than_the_memory_at_hand_is_refused(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory(4096, ()))
    text = "a host pool of 8192 bytes needs more memory than the 4096 bytes available on this machine"
    with pytest.raises(MemoryError, match=f"^{text}$"):
        HostMemory(2, 4096)


def test_a_pool_larger_than_a_control_group_leaves_is_refused_with_the_group(monkeypatch):
    group = GroupLimit("/sys/fs/cgroup/serving", "memory.max", 8192, 4096)
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory(2**40, (group,)))
    with pytest.raises(MemoryError) as caught:
        HostMemory(2, 4096)
    assert str(caught.value) == (
        "a host pool of 8192 bytes needs more memory than the 4096 bytes available in the control group "
        "/sys/fs/cgroup/serving (memory.max is 8192)"
    )


def test_a_pool_may_take_all_the_memory_at_hand(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory(8192, ()))
    assert len(HostMemory(2, 4096, show_progress=False).bytes) == 8192


def test_a_pool_is_made_where_the_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory(None, ()))
    assert len(HostMemory(2, 4096, show_progress=False).bytes) == 8192


def test_making_a_pool_shows_progress_on_standard_error_only(capsys):
    HostMemory(4, 64, show_progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "host pool" in err
    assert "100%" in err
