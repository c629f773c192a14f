"""Files that commands write: whole, or as they were."""

import os
import stat
import threading

import pytest

from kvjax._files import read_json, replacing


def write(path, content=b"new") -> None:
    with replacing(str(path)) as file:
        file.write(content)


def test_a_file_is_seen_only_as_a_whole(tmp_path):
    path = tmp_path / "file"
    for before in (None, b"new"):
        with replacing(str(path)) as file:
            file.write(b"n" * 3_000_000)
            file.flush()
            assert (path.read_bytes() if path.exists() else None) == before
            file.seek(0)
            file.truncate()
            file.write(b"new")
        assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_of_any_file_or_of_the_one_before(tmp_path):
    plain, path = tmp_path / "plain", tmp_path / "file"
    plain.touch()
    write(path)
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_links_stay_and_what_they_lead_to_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    link, way = tmp_path / "link", tmp_path / "way"
    link.symlink_to("way")
    way.symlink_to("folder/file")
    for content in (b"first", b"second"):
        write(link, content)
        assert (tmp_path / "folder" / "file").read_bytes() == content
    assert link.is_symlink()
    assert way.is_symlink()
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_a_pipe_is_written_as_it_is(tmp_path):
    path, came = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: came.append(path.read_bytes()))
    reader.start()
    write(path)
    reader.join()
    assert came == [b"new"]
    assert stat.S_ISFIFO(path.lstat().st_mode)


def test_what_a_process_has_open_is_not_replaced(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        write(f"/dev/fd/{file.fileno()}")
        assert file.read() == b"new"


@pytest.mark.parametrize("name", ["missing/file", "", ".", "new/", "loop", "x" * 300])
def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    with pytest.raises(ValueError, match=r"^'.*' cannot be written: [A-Z]"):
        write(name)
    assert os.listdir() == ["loop"]


def test_a_path_must_be_given():
    with pytest.raises(ValueError, match=r"^'' names no file$"):
        read_json("")
