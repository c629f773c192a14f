"""How commands open a tier: so that opening changes nothing, and its failures are one line."""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from kvjax.tiers import Tier

_NAMESPACE = re.compile(r"[0-9a-f]{32}")


def add_url(parser: argparse.ArgumentParser) -> None:
    """Adds the tier's URL."""
    parser.add_argument("url", metavar="URL", help="the tier, such as file:///var/cache/kvjax")


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Adds `--namespace`."""
    parser.add_argument(
        "--namespace", type=namespace, metavar="HEX", help="only entries of this namespace, 32 hexadecimal digits"
    )


def namespace(text: str) -> bytes:
    """Returns the namespace that `text` spells.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not _NAMESPACE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "must be 32 hexadecimal digits in lower case, as `kvjax tier inspect` shows them"
        )
    return bytes.fromhex(text)


def read_only(url: str) -> str:
    """Returns the URL of the same tier with `write=never`, which neither makes a folder nor tidies it up. An option
    that no tier takes stays, to be refused.

    >>> read_only("file:///cache?max_bytes=1GiB&write=back")
    'file:///cache?max_bytes=1GiB&write=never'
    """
    from kvjax.tiers.tier import Write

    address, _, query = url.partition("?")
    options = [option for option in query.split("&") if option]
    valid = {f"write={word}" for word in get_args(Write)}
    options = ["write=never" if option in valid else option for option in options]
    if not any(option.startswith("write=") for option in options):
        options.append("write=never")
    return f"{address}?{'&'.join(options)}"


@contextmanager
def opened(url: str) -> Iterator["Tier"]:
    """Opens a tier so that nothing changes in it but by calls.

    Raises:
        ValueError: the URL names no tier, or, while it is open, the tier fails or does not answer.
    """
    from kvjax.tiers import TierError, TierUnavailableError, open_tier

    tier = open_tier(read_only(url))
    try:
        yield tier
    except TierError as error:
        reason = str(error).removeprefix(tier.name).lstrip(": ")
        if reason.startswith(("cannot be reached", "refuses", "does not")):
            raise ValueError(f"{tier.name} {reason}") from error
        failed = "cannot be reached" if isinstance(error, TierUnavailableError) else "failed"
        raise ValueError(f"{tier.name} {failed}: {reason}") from error
    finally:
        tier.close()
