"""Events reach a callback or a file, and no fault of either reaches the caller."""

import json
import threading

import pytest

from kvjax.observe.events import GuardedCallback, JSONLinesEvents, KVEvent

STORED = KVEvent("stored", "full", "host", (b"\x00\x01", b"\xff"), ((0, 16), (16, 32)))
REMOVED = KVEvent("removed", "full", "host", (b"\x01",), ((0, 16),), "evicted")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_event_is_one_line(tmp_path):
    path = tmp_path / "events.jsonl"
    with JSONLinesEvents(path) as told:
        told(STORED)
        told(REMOVED)
        assert len(lines(path)) == 2, "each line is there at once"
    spans = [[0, 16], [16, 32]]
    assert lines(path) == [
        {
            "kind": "stored",
            "group": "full",
            "tier": "host",
            "keys": ["0001", "ff"],
            "token_spans": spans,
            "reason": "",
        },
        {
            "kind": "removed",
            "group": "full",
            "tier": "host",
            "keys": ["01"],
            "token_spans": spans[:1],
            "reason": "evicted",
        },
    ]


def test_a_file_that_exists_is_added_to(tmp_path):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with JSONLinesEvents(path) as told:
            told(STORED)
    assert len(lines(path)) == 2


def test_lines_of_several_threads_do_not_mix(tmp_path):
    path = tmp_path / "events.jsonl"
    long = KVEvent("stored", "full", "host", tuple(bytes([n]) * 16 for n in range(200)), ((0, 16),) * 200)
    with JSONLinesEvents(path) as told:
        threads = [threading.Thread(target=lambda: [told(long) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines(path)) == 200
    assert {len(line["keys"]) for line in lines(path)} == {200}


def test_an_event_after_close_is_refused(tmp_path):
    told = JSONLinesEvents(tmp_path / "events.jsonl")
    told.close()
    told.close()
    with pytest.raises(ValueError, match="events must not be told after `close`"):
        told(STORED)


@pytest.mark.parametrize("name", ["missing/events.jsonl", "", "a\0b"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="`path` must name a file that can be written, got"):
        JSONLinesEvents(tmp_path / name)


def test_a_full_disk_is_told_to_the_guard_only(caplog):
    guarded = GuardedCallback(told := JSONLinesEvents("/dev/full"))
    for _ in range(3):
        guarded(STORED)
    assert guarded.failures == 3
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="No space left"):
        told.close()


def test_an_exception_of_a_callback_is_logged_once_and_counted(caplog):
    seen = []

    def callback(event):
        seen.append(event)
        raise RuntimeError("the router is away")

    guarded = GuardedCallback(callback)
    for event in (STORED, REMOVED, STORED):
        guarded(event)
    assert seen == [STORED, REMOVED, STORED]
    assert guarded.failures == 3
    (record,) = caplog.records
    assert "raised; later exceptions of it are only counted" in record.getMessage()
    assert "the router is away" in str(record.exc_info)


def test_an_interrupt_passes_the_guard():
    def callback(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedCallback(callback)(STORED)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="`callback` must be callable with one event, got 7"):
        GuardedCallback(7)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"token_spans": ((0, 16),)}, "`token_spans` must hold one span for each of 2 keys, got 1"),
        ({"reason": "evicted"}, "`reason` must say why chunks are removed, and only that, got 'evicted'"),
        ({"kind": "removed"}, "`reason` must say why chunks are removed, and only that, got ''"),
    ],
)
def test_an_event_that_contradicts_itself_is_refused(change, text):
    fields = {"kind": "stored", "group": "a", "tier": "host", "keys": (b"1", b"2"), "token_spans": ((0, 1), (1, 2))}
    with pytest.raises(ValueError, match=text):
        KVEvent(**fields | change)
