"""Which transport is taken where, and what is said where one cannot be."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.memory import direct, transports
from kvjax.memory.limits import pinned_limit_bytes
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes, make_transport
from kvjax.packing import cut_into_units, unit_bytes
from tests.support.meshes import LAYOUT, SPLIT, SPLITS, mesh_of
from tests.support.toy_engine import make_caches

GIB = 2**30


def caches_on(platform, layout=SPLIT, split="one device"):
    """Registered caches of the CPU backend, said to be those of another platform."""
    shape, sharding_of = SPLITS[split]
    mesh = mesh_of(*shape)
    host = make_caches(layout, 16)
    caches = {
        name: jax.device_put(np.asarray(host[name]), sharding_of(leaf, mesh)) for name, leaf in layout.leaves.items()
    }
    registered = register(layout, caches)
    return replace(registered, devices=(SimpleNamespace(platform=platform),) * len(registered.devices))


def units_for(granule, layout=SPLIT):
    chunking = kvjax.resolve_chunking(layout)
    return chunking, cut_into_units(chunking, unit_bytes(chunking, granule))


@pytest.mark.parametrize(
    ("platform", "split", "granule"),
    [
        ("cpu", "one device", 4),
        ("cpu", "heads over 4", 4),
        ("gpu", "one device", 256),
        ("tpu", "one device", 8192),
        ("gpu", "heads over 4", 1024),
        ("tpu", "heads over 8", 65536),
        ("tpu", "blocks over 8", 8192),
    ],
)
def test_the_granule_serves_every_device(platform, split, granule):
    assert granule_bytes(caches_on(platform, split=split)) == granule


@pytest.mark.parametrize(
    ("layout", "split", "reason"),
    [
        (LAYOUT, "heads over 4", r"`caches` leaf 'latent' is replicated, and would be kept once per device"),
        (SPLIT, "heads over 4, all twice", r"`caches` leaf 'heads.k' is replicated"),
        (SPLIT, "blocks over 8", r"`caches` leaf 'heads.k' is split over blocks"),
        (SPLIT, "one device", None),
        (SPLIT, "heads over 8", None),
    ],
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_an_accelerator_cannot_move_directly_is_named(platform, layout, split, reason):
    caches = caches_on(platform, layout, split)
    _, units = units_for(granule_bytes(caches), layout)
    found = direct.refusal(caches, units, 100)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_units_that_a_device_cannot_address_are_named():
    _, units = units_for(256)
    assert direct.refusal(caches_on("tpu"), units, 10) == (
        "units must be multiples of 8192 bytes on each device, got 256 bytes on all of them"
    )
    assert (
        direct.refusal(caches_on("gpu"), units, 2**31)
        == "the host pool must have fewer than 2**31 units, got 2147483648"
    )


@pytest.mark.parametrize(
    ("platform", "environment", "limit"),
    [
        ("gpu", {}, 64 * GIB),
        ("gpu", {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}, 100 * GIB),
        ("tpu", {}, None),
        ("cpu", {}, None),
    ],
)
def test_the_limit_of_pinned_memory_is_that_of_the_platform(platform, environment, limit):
    assert pinned_limit_bytes(platform, environment) == limit


def test_a_limit_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` must be a whole number of GiB, got 'x'"):
        pinned_limit_bytes("gpu", {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "x"})


@pytest.mark.parametrize("transfer", ["auto", "direct"])
def test_a_budget_above_the_limit_of_pinned_memory_is_refused_with_the_way_out(transfer):
    """Host memory of 80 GiB was asked of an allocator that stops at 64."""
    chunking, units = units_for(256)
    text = (
        f"`host_bytes` must be at most {64 * GIB}, XLA's limit of pinned memory, got {80 * GIB}; raise it by the "
        "environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or choose `transfer='staged'`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make_transport(
            transfer, caches_on("gpu"), chunking, units, num_units=80 * GIB // units.unit_bytes, staging_units=64
        )


def made(monkeypatch, platform, transfer, *, layout=SPLIT, split="one device", fails=None):
    """What `make_transport` makes, with stand-ins that need no accelerator."""

    def make_direct(*_, **__):
        if fails is not None:
            raise fails
        return "direct"

    monkeypatch.setattr(transports, "DirectTransport", make_direct)
    monkeypatch.setattr(transports, "StagedTransport", lambda *_, **__: "staged")
    caches = caches_on(platform, layout, split)
    chunking, units = units_for(granule_bytes(caches), layout)
    return make_transport(transfer, caches, chunking, units, num_units=16, staging_units=64)


@pytest.mark.parametrize(
    ("platform", "transfer", "taken"),
    [
        ("gpu", "auto", "direct"),
        ("gpu", "staged", "staged"),
        ("tpu", "auto", "staged"),
        ("tpu", "direct", "direct"),
        ("tpu", "staged", "staged"),
    ],
)
def test_auto_takes_the_direct_way_where_it_is_known_to_be_no_slower(monkeypatch, platform, transfer, taken):
    assert made(monkeypatch, platform, transfer) == taken


def test_auto_says_why_it_passed_the_direct_way_over(monkeypatch, caplog):
    with caplog.at_level("INFO", "kvjax"):
        made(monkeypatch, "tpu", "auto")
        made(monkeypatch, "gpu", "auto", layout=LAYOUT, split="heads over 4")
        made(monkeypatch, "gpu", "auto", fails=RuntimeError("no\n   such kernel"))
    assert [record.getMessage() for record in caplog.records if record.name == transports.__name__] == [
        "`transfer` is 'staged', as 'direct' was not taken: it has not been shown to be faster on a TPU",
        "`transfer` is 'staged', as 'direct' was not taken: "
        "`caches` leaf 'latent' is replicated, and would be kept once per device",
        "`transfer` is 'staged', as 'direct' failed to start: no such kernel",
    ]


def test_direct_raises_what_it_cannot_do(monkeypatch):
    with pytest.raises(ValueError, match=r"`transfer` must not be 'direct' here: `caches` leaf 'latent' is replicated"):
        made(monkeypatch, "gpu", "direct", layout=LAYOUT, split="heads over 4")
    with pytest.raises(ValueError, match=r"`transfer` must not be 'direct' here: no such kernel"):
        made(monkeypatch, "gpu", "direct", fails=RuntimeError("no\n   such kernel"))
    with pytest.raises(MemoryError, match="pinned"):
        made(monkeypatch, "gpu", "direct", fails=MemoryError("no pinned memory"))


def test_warm_up_lists_what_it_compiles(caplog):
    caches = make_caches(SPLIT, 16)
    with caplog.at_level("INFO", "kvjax.memory.programs"):
        kvjax.Offloader(SPLIT, caches, host_bytes=10**5, transfer="staged", show_progress=False).close()
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("compiled pack of group 0 in ")
    assert {"pack of group 0", "unpack of group 1", "cut of 1 units", "put of 2 units"} <= {
        text.removeprefix("compiled ").rsplit(" in ", 1)[0] for text in texts
    }
