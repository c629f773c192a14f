"""`examples/gemma_decode.py --tier`: real processes that restore what earlier or other ones stored."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gemma_decode import main

from tests.examples.test_gemma_decode import EXAMPLES, TINY, run_json
from tests.support.redis_server import NEEDS_REDIS, redis_server

PATIENCE_S = 240.0  # nothing comes near it, unless something hangs
LOOK_S = 0.002


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts the example as a process of its own, which ends with the block at the latest."""
    command = [sys.executable, str(EXAMPLES / "gemma_decode.py"), *TINY, "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process that ends well prints."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return json.loads(out)


def until(there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits for what a process does."""
    limit = time.monotonic() + PATIENCE_S
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(LOOK_S)


def is_right(result: dict[str, Any], digest: str) -> None:
    """All its modes, one of which never offloads, have the tokens of `digest`, and equal logits."""
    assert result["tokens_identical"] is True
    assert result["max_abs_logit_diff"] == 0.0
    assert result["tokens_digest"] == digest


def entries_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("kvjax-1/*/*/*/*") if not path.name.endswith("__lock")]


def test_a_second_process_restores_the_conversations_of_the_first(tmp_path: Path):
    url = f"file://{tmp_path}"
    with started("--tier", url) as process:
        first = ended(process)
    assert set(first["restored_from"]) == {"host"}
    assert first["tiers"][0]["chunks_written"] == len(entries_in(tmp_path)) > 0
    with started("--tier", url) as process:
        second = ended(process)
    is_right(second, first["tokens_digest"])
    assert second["recomputed_tokens"] == 0
    assert second["restored_from"][url] > second["prompt_tokens"] / 2
    tier = second["tiers"][0]
    assert (tier["chunks_written"], tier["bad_chunks"], tier["errors"]) == (0, 0, 0)
    assert tier["chunks_read"] > 0


def test_a_killed_process_leaves_a_tier_that_a_clean_one_uses(tmp_path: Path):
    """SIGKILL comes while conversations are served and written."""
    url = f"file://{tmp_path}"
    with started("--tier", url, "--turns", "8") as process:
        until(lambda: len(entries_in(tmp_path)) > 5, process)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    left = len(entries_in(tmp_path))
    with started("--tier", url, "--turns", "8") as process:
        result = ended(process)
    is_right(result, result["tokens_digest"])
    tier = result["tiers"][0]
    assert tier["chunks_read"] + tier["chunks_known"] > 0
    assert (tier["bad_chunks"], tier["errors"]) == (0, 0)
    assert len(entries_in(tmp_path)) > left


@NEEDS_REDIS
def test_two_processes_share_a_redis_server():
    """The first one is stopped after it stored something, so that both are there while the second one restores it."""
    with redis_server() as server, server.client() as client, started("--tier", server.url()) as first:
        until(lambda: client.dbsize() > 20, first)
        first.send_signal(signal.SIGSTOP)
        with started("--tier", server.url()) as second:
            of_second = ended(second)
        first.send_signal(signal.SIGCONT)
        of_first = ended(first)
    is_right(of_first, of_first["tokens_digest"])
    is_right(of_second, of_first["tokens_digest"])
    (tier,) = of_second["tiers"]
    assert of_second["restored_from"][tier["name"]] > 0
    assert tier["chunks_read"] > 0
    assert (tier["bad_chunks"], of_first["tiers"][0]["bad_chunks"]) == (0, 0)


def test_what_was_damaged_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = run_json(capsys, "--tier", f"file://{tmp_path}")
    for path in entries_in(tmp_path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    result = run_json(capsys, "--tier", f"file://{tmp_path}")
    is_right(result, good["tokens_digest"])
    assert result["tiers"][0]["bad_chunks"] > 0
    assert result["tiers"][0]["chunks_read"] == 0


def test_fused_steps_restore_from_a_tier_below_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiers = [f"file://{tmp_path}/{name}" for name in ("upper", "lower")]
    good = run_json(capsys, "--tier", tiers[1], "--fused")
    result = run_json(capsys, "--tier", tiers[0], "--tier", tiers[1], "--fused")
    # Steps that move blocks are compiled as programs of their own, whose sums may have another order.
    assert result["tokens_identical"] is True
    assert result["tokens_digest"] == good["tokens_digest"]
    assert result["restored_from"][tiers[1]] > 0
    assert [tier["name"] for tier in result["tiers"]] == tiers


def test_a_run_of_other_bits_restores_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With other steps, sums have another order: caches of the two runs differ in their last bits."""
    run_json(capsys, "--tier", f"file://{tmp_path}")
    result = run_json(capsys, "--tier", f"file://{tmp_path}", "--rows", "8")
    assert result["tiers"][0]["chunks_read"] == 0
    assert result["max_abs_logit_diff"] == 0.0


def test_tables_tell_of_each_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*TINY, "--tier", f"file://{tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "Levels below the device" in out
    assert "tokens restored" in out
    assert "file:///" in out


@pytest.mark.parametrize(
    ("url", "said"), [("/tmp/x", "a plain path"), ("redis://u:secret@host:x/", "port"), ("file:///x?a=1", "option")]
)
def test_a_bad_url_is_one_line(url: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main([*TINY, "--json", "--tier", url]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert "secret" not in err
