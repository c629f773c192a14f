"""What a trace holds, that recording never breaks serving, and that whatever is wrong with a file is told by line."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax import resolve_chunking
from kvjax.geometry import layout_from_geometry
from kvjax.observe.calls import (
    MOST_TOKENS,
    ExtendCall,
    FinishCall,
    InvalidateCall,
    LoadCall,
    LookupCall,
    StoreCall,
)
from kvjax.observe.trace import TraceWriter, read_trace
from kvjax.observe.trace_lines import call_line, call_of
from tests.support.layouts import EVERYTHING

NAMESPACE = bytes(range(16))
HASHES = [bytes([n]) * 16 for n in range(1, 9)]
TOKENS = st.integers(0, MOST_TOKENS)
NAMES = st.text()
CALLS = st.one_of(
    st.builds(
        LookupCall,
        NAMES,
        st.binary(min_size=16, max_size=16),
        st.integers(100, MOST_TOKENS),
        st.binary(),
        st.integers(0, 99) | st.dictionaries(st.text(), st.integers(0, 99)),
    ),
    st.builds(ExtendCall, NAMES, TOKENS, st.binary()),
    st.builds(LoadCall, NAMES),
    st.builds(StoreCall, NAMES, TOKENS, st.booleans()),
    st.builds(FinishCall, NAMES),
    st.builds(InvalidateCall, st.none() | st.binary(min_size=16, max_size=16)),
)
HEADER = {
    "format": "kvjax-trace",
    "version": 1,
    "tokens_per_hash": 16,
    "created_by": "a test",
    "geometry": None,
    "blocks_per_chunk": None,
}
LOOKUP = {
    "call": "lookup",
    "request": "7",
    "namespace": NAMESPACE.hex(),
    "num_tokens": 40,
    "hashes": b"".join(HASHES[:2]).hex(),
    "device_tokens": 0,
}


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def num_lookups(trace):
    return sum(isinstance(call, LookupCall) for call in trace.calls)


def record(writer, name="7"):
    writer.lookup(name, namespace=NAMESPACE, num_tokens=40, hashes=HASHES[:2], device_tokens={"full": 3})
    writer.load(name)
    writer.store(name, num_tokens=40)
    writer.extend(name, num_tokens=64, hashes=HASHES[2:4])
    writer.store(name, num_tokens=64, checkpoint=True)
    writer.finish(name)


@given(CALLS)
def test_a_call_is_read_as_it_was_written(call):
    assert call_of(json.loads(json.dumps(call_line(call)))) == call


def test_a_trace_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, tokens_per_hash=16) as writer:
        record(writer, 7)
        writer.invalidate(NAMESPACE)
        writer.invalidate()
        assert writer.failed == ""
    trace = read_trace(path)
    assert (trace.tokens_per_hash, trace.created_by, trace.cut_off) == (16, f"kvjax {kvjax.__version__}", False)
    assert trace.calls == [
        LookupCall("int 7", NAMESPACE, 40, HASHES[0] + HASHES[1], {"full": 3}),
        LoadCall("int 7"),
        StoreCall("int 7", 40),
        ExtendCall("int 7", 64, HASHES[2] + HASHES[3]),
        StoreCall("int 7", 64, checkpoint=True),
        FinishCall("int 7"),
        InvalidateCall(NAMESPACE),
        InvalidateCall(),
    ]
    assert num_lookups(trace) == 1


def test_the_header_can_hold_the_cache_that_was_recorded(tmp_path):
    path = tmp_path / "trace.jsonl"
    cut = resolve_chunking(EVERYTHING, blocks_per_chunk={"local": 2, "mla": 3})
    TraceWriter(path, tokens_per_hash=cut.tokens_per_hash, chunking=cut).close()
    trace = read_trace(path)
    again = resolve_chunking(layout_from_geometry(trace.geometry), blocks_per_chunk=trace.blocks_per_chunk)
    assert (again.blocks_per_chunk, again.chunk_bytes) == (cut.blocks_per_chunk, cut.chunk_bytes)
    assert [group.kind for group in again.layout.groups] == [group.kind for group in EVERYTHING.groups]


def test_the_lines_are_the_documented_ones(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, tokens_per_hash=16) as writer:
        writer.lookup("7", namespace=NAMESPACE, num_tokens=40, hashes=HASHES[:2])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [HEADER | {"created_by": f"kvjax {kvjax.__version__}"}, LOOKUP]


def test_threads_record_whole_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, tokens_per_hash=16) as writer:
        threads = [
            threading.Thread(target=lambda n=n: [record(writer, f"{n}-{i}") for i in range(100)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert num_lookups(read_trace(path)) == 400


# --- a file that fails ----------------------------------------------------------------------------------


def test_a_full_disk_ends_the_record_and_not_the_caller(caplog):
    writer = TraceWriter("/dev/full", tokens_per_hash=16)
    record(writer)
    assert writer.failed == "", "all of it is still buffered"
    writer.flush()
    assert "/dev/full" in writer.failed
    assert "No space left" in writer.failed
    for _ in range(20_000):
        record(writer)
    writer.flush()
    writer.close()
    assert len(caplog.records) == 1


def test_a_full_buffer_on_a_full_disk_ends_the_record(caplog):
    with TraceWriter("/dev/full", tokens_per_hash=16) as writer:
        for _ in range(20_000):
            record(writer)
    assert writer.failed
    assert len(caplog.records) == 1


def test_a_disk_that_is_full_at_the_end_is_told(caplog):
    writer = TraceWriter("/dev/full", tokens_per_hash=16)
    writer.close()
    assert writer.failed
    assert len(caplog.records) == 1


def test_nothing_is_recorded_after_close(tmp_path):
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path, tokens_per_hash=16)
    writer.close()
    record(writer)
    writer.flush()
    writer.close()
    assert list(read_trace(path).calls) == []


@pytest.mark.parametrize("name", ["missing/trace.jsonl", "", "a\0b"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="`path` must name a file that can be written, got"):
        TraceWriter(tmp_path / name, tokens_per_hash=16)


@pytest.mark.parametrize("unit", [0, True, 1.5, "16", 2**30])
def test_a_hash_unit_that_is_none_is_refused(tmp_path, unit):
    with pytest.raises(ValueError, match="`tokens_per_hash` must be"):
        TraceWriter(tmp_path / "trace.jsonl", tokens_per_hash=unit)
    assert not (tmp_path / "trace.jsonl").exists()


# --- files that are wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"call": "tokens"}, "`call` must be one of lookup, extend, load, store, finish, invalidate, got 'tokens'"),
        ({"call": None}, "`call` must be one of"),
        ({"tokens": [1, 2]}, "a lookup call has the unknown key 'tokens'; known are call, request,"),
        ({"request": 7}, "`request` must be a string, got an int"),
        ({"namespace": "00"}, "`namespace` must be 16 bytes in hexadecimal digits, got 1"),
        ({"namespace": None}, "`namespace` must be a string, got null"),
        ({"num_tokens": 0}, "`num_tokens` must be an int from 1 to 33554432, got 0"),
        ({"num_tokens": 40.0}, "`num_tokens` must be an int, got a float"),
        ({"num_tokens": True}, "`num_tokens` must be an int, got true"),
        ({"num_tokens": 10**4000}, r"`num_tokens` must be an int from 1 to 33554432, got 1000+\.\.\.0+$"),
        ({"num_tokens": 64}, "`hashes` must hold one hash of 16 bytes for each whole unit of 16 tokens, 4 in all, got"),
        ({"hashes": "zz"}, "`hashes` must be hexadecimal digits, got 'zz'"),
        ({"hashes": "00 11"}, "`hashes` must be hexadecimal digits without spaces"),
        ({"hashes": ["00"]}, "`hashes` must be a string, got a list"),
        ({"device_tokens": 40}, "`device_tokens` must be below the 40 tokens of the prompt, got 40"),
        ({"device_tokens": {"a": 40}}, "`device_tokens` must be below the 40 tokens of the prompt, got 40"),
        ({"device_tokens": {"a": -1}}, "`device_tokens` of 'a' must be an int from 0"),
        ({"device_tokens": -1}, "`device_tokens` must be an int from 0"),
    ],
)
def test_a_wrong_lookup_is_told_by_its_line(tmp_path, change, text):
    path = written(tmp_path / "t.jsonl", HEADER, LOOKUP, LOOKUP | change, LOOKUP)
    with pytest.raises(ValueError, match=f"t.jsonl', line 3: {text}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([{"call": "load", "request": "7"}], "line 2: `request` must be one that was looked up and not finished"),
        ([LOOKUP, {"call": "load"}], "line 3: a load call must have the key 'request'"),
        ([LOOKUP, *[{"call": "load", "request": "7"}] * 2], "line 4: `request` must be looked up again before"),
        ([LOOKUP, *[{"call": "finish", "request": "7"}] * 2], "line 4: `request` must be one that was looked up"),
        (
            [LOOKUP, {"call": "extend", "request": "7", "num_tokens": 39, "hashes": ""}],
            "line 3: `num_tokens` must be at least the 40 of before, got 39",
        ),
        (
            [LOOKUP, {"call": "extend", "request": "7", "num_tokens": 48, "hashes": ""}],
            "line 3: `hashes` must hold one hash of 16 bytes for each whole unit of 16 tokens, 1 in all, got 0 bytes",
        ),
        (
            [LOOKUP, {"call": "store", "request": "7", "num_tokens": 41, "checkpoint": False}],
            "line 3: `num_tokens` must be at most the 40 tokens that the request has, got 41",
        ),
        (
            [LOOKUP, {"call": "store", "request": "7", "num_tokens": 4, "checkpoint": 1}],
            "line 3: `checkpoint` must be true or false, got an int",
        ),
        ([[LOOKUP]], "line 2: a call must be an object, got a list"),
        ([{"call": "invalidate", "namespace": 5}], "line 2: `namespace` must be a string, got an int"),
    ],
)
def test_calls_that_do_not_follow_on_each_other_are_told_by_their_line(tmp_path, calls, text):
    with pytest.raises(ValueError, match=text):
        read_trace(written(tmp_path / "t.jsonl", HEADER, *calls))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ([], "the first line of a trace must be an object with `format` 'kvjax-trace'"),
        (LOOKUP, "the first line of a trace must be an object with `format` 'kvjax-trace'"),
        (HEADER | {"version": 2}, "`version` must be 1, got 2"),
        (HEADER | {"tokens_per_hash": 0}, "`tokens_per_hash` must be an int from 1"),
        (HEADER | {"tokens_per_hash": 2**60}, "`tokens_per_hash` must be an int from 1"),
        (HEADER | {"model": "m"}, "the header has the unknown key 'model'"),
        (HEADER | {"geometry": []}, "`geometry` must be an object or null, got a list"),
        (HEADER | {"blocks_per_chunk": {"a": 0}}, "`blocks_per_chunk` of 'a' must be an int from 1"),
        (HEADER | {"blocks_per_chunk": 2}, "`blocks_per_chunk` must be an object of ints by group name, got an int"),
        (HEADER | {"created_by": None}, "`created_by` must be a string, got null"),
        ({"format": "kvjax-trace", "version": 1}, "the header must have the key 'tokens_per_hash'"),
    ],
)
def test_a_wrong_header_is_told(tmp_path, header, text):
    with pytest.raises(ValueError, match=f"t.jsonl', line 1: {text}"):
        read_trace(written(tmp_path / "t.jsonl", header, LOOKUP))


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path):
    path = written(tmp_path / "t.jsonl", HEADER, LOOKUP, {"call": "load", "request": "7"})
    content = path.read_bytes()
    whole = content.rindex(b"\n", 0, -1) + 1
    for cut in range(whole + 1, len(content) - 1):
        path.write_bytes(content[:cut])
        trace = read_trace(path)
        assert (trace.cut_off, num_lookups(trace), len(trace.calls)) == (True, 1, 1)
    path.write_bytes(content[:-1])
    assert (read_trace(path).cut_off, len(read_trace(path).calls)) == (False, 2), "only the line's end is missing"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"\n", "line 1: is not JSON"),
        (b'{"format', "line 1: is not JSON"),
        (b"\xff\xfe\n", "line 1: is not UTF-8 text"),
        (json.dumps(HEADER).encode() + b"\n{broken\n{}\n", "line 2: is not JSON"),
        (json.dumps(HEADER).encode() + b"\n" + b"[" * 200_000 + b"\n", "line 2: is nested too deeply"),
        (json.dumps(HEADER).encode() + b"\n\n", "line 2: is not JSON"),
        (json.dumps(HEADER).encode() + b"\n" + b"9" * 5000 + b"\n", "line 2: is not JSON"),
    ],
)
def test_what_is_no_trace_is_told(tmp_path, content, text):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=text):
        read_trace(path)


def test_a_line_beyond_all_measure_is_refused_and_not_taken_for_a_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax.observe.trace._MOST_LINE_BYTES", 300)
    path = written(tmp_path / "t.jsonl", HEADER, LOOKUP | {"request": "7" * 300})
    with pytest.raises(ValueError, match="line 2: a line must be at most 300 bytes, and is more"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "missing", "a\0b"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_trace(path)
