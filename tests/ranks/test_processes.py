"""Real processes under `jax.distributed` on loopback, with caches split over all of their devices."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 180


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module", params=[(2, 2), (4, 1)], ids=["2 processes", "4 processes"])
def seen(request, tmp_path_factory):
    """What each process saw; nothing from the one that died last."""
    num_ranks, devices = request.param
    port, folder = free_port(), tmp_path_factory.mktemp("tier")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_process", *map(str, (rank, num_ranks, port, devices, folder))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        ended = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * (num_ranks - 1) + [9], [
        (code, err[-1500:]) for code, (_, err) in zip(codes, ended, strict=True)
    ]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended[:-1]]


def test_all_processes_see_the_same(seen):
    own = [process.pop("own") for process in seen]
    assert all(process == seen[0] for process in seen)
    assert len({one["shard"] for one in own}) == len(own)
    for process, one in zip(seen, own, strict=True):
        process["own"] = one


def test_each_process_restores_its_own_pieces_and_touches_nothing_else(seen):
    blocks = list(range(2, 10))
    rest = [0, 1, *range(10, 16)]
    for process in seen:
        assert process["first"] == [0, True, 0, ""]
        assert process["again"] == [32, True]
        restored, untouched = process["restored"], process["untouched"]
        assert restored["full.k"] == restored["full.v"] == restored["latent"] == blocks
        assert untouched["full.k"] == untouched["full.v"] == untouched["latent"] == rest
        assert restored["local.kv"] == [8, 9]
        assert untouched["local.kv"] == [*range(8), *range(10, 16)]
        assert process["state"]
        assert untouched["state"] == [*range(9), *range(10, 16)]


def test_the_caches_keep_their_sharding(seen):
    for process in seen:
        assert process["kept"]


def test_what_cannot_be_kept_is_refused(seen):
    for process in seen:
        assert "leaf 'latent' must have its blocks on every process, got" in process["split"]
        assert process["shard"] == "`shard` must be a string, got 3"
        assert "must have been made for caches of this process only" in process["fused"]


def test_what_one_process_lost_or_failed_to_load_is_a_miss_for_all(seen):
    for process in seen:
        assert process["lost on one"] == [0, True, 0, ""]
        assert process["failed on one"] == [32, False, 0, "rank 1: InjectedError: a piece failed on its way"]
        assert process["and then"] == [32, True, 32, ""]


def test_all_processes_restore_from_a_tier_after_a_restart(seen):
    for process in seen:
        assert process["tier, first"] == [0, True, 0, ""]
        assert process["tier, after a restart"] == [32, True, 32]


def test_a_process_that_dies_is_named_within_the_deadline(seen):
    for process in seen:
        assert process["lost"] == [len(seen)]
        assert process["in time"]
        assert f"nothing came from rank {len(seen)} of {len(seen) + 1} within 2 s" in process["message"]
