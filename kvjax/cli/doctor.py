"""`kvjax doctor`: which transports this machine can take and why, and the limits of its memory."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import kvjax
from kvjax._checks import integer
from kvjax.chunking import Chunking, resolve_chunking
from kvjax.cli.doctor_limits import describe_limits, limit_warnings
from kvjax.cli.model_options import add_model, read_cache
from kvjax.cli.options import add_json, blocks_per_chunk, size

_LIBRARIES = ("jax", "jaxlib", "numpy")
_RUNTIMES = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_EXTRAS = ("tensorstore", "redis", "prometheus_client", "matplotlib", "flax", *_RUNTIMES)
_OWN_OPTIONS = {"command", "run", "json", "no_test", "geometry", "host_bytes"}
_DESCRIPTION = """\
Says what JAX runs on, which transports the default device can take and why not, which of them `transfer="auto"`
takes, and the limits of memory; where one is likely to bite, a warning says what to do. Each transport that can be
taken stores and loads a few chunks of random bytes, and every byte is compared.

With --host-bytes it also checks that a pool of one process can be that large and, with a GEOMETRY, that it holds a
chunk of every group. The exit code is 0 if what "auto" takes works and the budget fits, else 1."""


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and its limits",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "geometry",
        nargs="?",
        metavar="GEOMETRY",
        help="a geometry file, a model's config.json, or the folder of one, to check the budget for",
    )
    parser.add_argument("--host-bytes", type=size, metavar="S", help="budget of one process's host pool, such as 64GiB")
    parser.add_argument(
        "--blocks-per-chunk",
        type=blocks_per_chunk,
        metavar="N|NAME=N,...|auto",
        help="blocks of a group that move together: one number, one per group, or auto (default 1)",
    )
    parser.add_argument("--no-test", action="store_true", help="move no bytes: only say what is known without")
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what was found; returns 0 if the transport that `"auto"` takes works and the budget, if any, fits, else 1.

    Raises:
        ValueError: bad input, or JAX cannot start the backend that it was told to take.
    """
    cut = _chunking(args)
    from kvjax.cli.doctor_budget import describe_budget
    from kvjax.cli.doctor_probe import describe_devices, describe_transports, local_devices, probe_of, works
    from kvjax.observe.progress import progress_bar

    extras = {name: _version(name) for name in _EXTRAS}
    runtimes = [name for name in _RUNTIMES if extras[name] is not None]
    devices = local_devices(runtimes)
    with progress_bar("kvjax doctor", 3) as done:
        probe = probe_of(devices[0])
        done(1)
        transports = describe_transports(probe, test=not args.no_test, done=done)
    taken = next(transport for transport in transports if transport["auto"])
    limits = describe_limits(probe.platform)
    budget = None
    if args.host_bytes is not None:
        budget = describe_budget(args.host_bytes, cut, probe.platform, probe.granule_bytes, taken["transfer"])
    document = {
        "platform": probe.platform,
        "devices": describe_devices(devices),
        "versions": _versions(),
        "extras": extras,
        "granule_bytes": probe.granule_bytes,
        "transports": transports,
        "limits": limits,
        "budget": budget,
        "warnings": [
            *_runtime_warnings(probe.platform, runtimes),
            *_transport_warnings(transports),
            *limit_warnings(limits, probe.platform),
        ],
    }
    _show(document, as_json=args.json)
    return 0 if works(taken) and (budget is None or budget["fits"]) else 1


def _chunking(args: argparse.Namespace) -> Chunking | None:
    """The chunks of the geometry, if one is given."""
    if args.host_bytes is not None:
        integer(args.host_bytes, "--host-bytes", at_least=1)
    if args.geometry is None:
        for name, value in vars(args).items():
            if name not in _OWN_OPTIONS and value is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for a GEOMETRY, and none is given")
        return None
    if args.host_bytes is None:
        raise ValueError("a GEOMETRY is checked against a budget: give it with --host-bytes")
    layout, _ = read_cache(args)
    return resolve_chunking(layout, blocks_per_chunk=args.blocks_per_chunk)


def _versions() -> dict[str, str | None]:
    found = {name: _version(name) for name in _LIBRARIES}
    return {"kvjax": kvjax.__version__, "python": platform.python_version(), **found}


def _version(distribution: str) -> str | None:
    """The version of what is installed, or `None`."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _runtime_warnings(platform_name: str, runtimes: Sequence[str]) -> list[str]:
    if platform_name != "cpu" or not runtimes or "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return []
    return [f"JAX runs on the CPU although {', '.join(runtimes)} is installed: it found no device for that"]


def _transport_warnings(transports: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"the {one['transfer']} transport{', which auto takes,' if one['auto'] else ''} failed its test: do not use it"
        for one in transports
        if one["tested"] not in ("ok", None)
    ]


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    for warning in document["warnings"]:
        print(f"kvjax doctor: warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render_doctor

        render_doctor.print_doctor(document)
