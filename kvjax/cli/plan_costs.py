"""What `kvjax plan` says of costs, as JSON: bytes per token, caps, states, checkpoints, requests, host budgets."""

import argparse
import re
import reprlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvjax._checks import integer
from kvjax.accounting import (
    Checkpoints,
    HostAccount,
    bytes_per_token,
    bytes_per_token_growing,
    checkpoint_bytes,
    device_bytes,
    distinct_shards,
    state_bytes,
    window_cap_bytes,
)
from kvjax.capacity import UncountableError
from kvjax.checkpoints import default_checkpoint_tokens
from kvjax.chunking import Chunking
from kvjax.packing import Units, tokens_that_fit

Choice = int | str | tuple[int, ...]

# The length at which shares are told where none is given.
_SHARE_TOKENS = 32768
_INT = re.compile(r"-?[0-9]{1,30}")


def checkpoint_choice(text: str) -> Choice:
    """Returns what `--checkpoint-tokens` says.

    Raises:
        argparse.ArgumentTypeError: it is no int and none of the words.

    >>> checkpoint_choice("4096"), checkpoint_choice("end")
    (4096, 'end')
    """
    if text in ("auto", "dense", "end"):
        return text
    if _INT.fullmatch(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"must be N, auto, dense or end, got {reprlib.repr(text)}")


def checkpoint_list(text: str) -> tuple[int, ...]:
    """Returns the positions that `--checkpoints` lists.

    Raises:
        argparse.ArgumentTypeError: one of them is no int.

    >>> checkpoint_list("1000,5000")
    (1000, 5000)
    """
    parts = text.split(",")
    if not all(_INT.fullmatch(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be P,P,…, ints, got {reprlib.repr(text)}")
    return tuple(int(part) for part in parts)


def number(value: Fraction | None) -> int | float | None:
    """Returns a whole number as an `int`, any other as the nearest `float`."""
    if value is None:
        return None
    return int(value) if value.denominator == 1 else float(value)


class Costs:
    """The accounts of one plan.

    Args:
        cut: the groups, as one rank has them, and their chunks.
        units: how chunks are cut into units.
        ranks: ranks that share the host's memory.
        distinct: by group, how many of them differ in content; all by default.
        checkpoints: tokens between checkpoints, `"auto"`, `"dense"`, `"end"`, or the positions of a request.
        request_tokens: length of the requests to count, or `None`.

    Raises:
        ValueError: a value out of range, a checkpoint past the end of the request, or positions without a request.
    """

    def __init__(
        self,
        cut: Chunking,
        units: Units,
        *,
        ranks: int = 1,
        distinct: Mapping[str, int] | None = None,
        checkpoints: Choice = "auto",
        request_tokens: int | None = None,
    ):
        self._cut, self._layout, self._units = cut, cut.layout, units
        self._ranks = ranks
        self._shards = distinct_shards(cut.layout, ranks, distinct)
        self._request_tokens = request_tokens
        if request_tokens is not None:
            integer(request_tokens, "request_tokens", at_least=1)
        self.share_tokens = request_tokens or _SHARE_TOKENS
        self.warnings: list[str] = []
        self.accounts: dict[str, HostAccount | None] = {"dense": None, "every": None, "end": None}
        for rule in ("dense", "end"):
            self._open(units, Checkpoints(rule))
        # The default is made of the same store sets: where those are not counted, there is none.
        countable = self.accounts["end"] is not None
        self._default = default_checkpoint_tokens(cut) if countable else None
        self._of_one = checkpoint_bytes(cut, units, self._shards) if countable else {}
        self._source = "default" if checkpoints == "auto" else "given"
        self.chosen = _chosen(checkpoints, self._default, request_tokens)
        every = self.chosen.checkpoint_tokens or self._default
        if every:
            self._open(units, Checkpoints("every", every))
        if self.chosen.rule == "listed":
            self._open(units, self.chosen)
        if checkpoints == self.chosen.checkpoint_tokens and request_tokens and request_tokens < (every or 0):
            self.warnings.append(f"no checkpoint every {every} tokens lies within a request of {request_tokens} tokens")
        account = self.accounts[self.chosen.rule]
        self._cost = account and account.cost(self.share_tokens)

    def _open(self, units: Units, checkpoints: Checkpoints) -> None:
        self.accounts[checkpoints.rule] = None
        try:
            self.accounts[checkpoints.rule] = HostAccount(self._cut, units, checkpoints, shards=self._shards)
        except UncountableError as error:
            self.warnings.append(f"requests with checkpoints {words(checkpoints)} are not counted on the host: {error}")

    def group(self, g: int) -> dict[str, Any]:
        """Returns the costs of one group, those of the device on one rank."""
        group = self._layout.groups[g]
        per_token = bytes_per_token(group)
        shares = self._cost.shares() if self._cost else {}
        held = self._cost and group.is_cached and self._cost.growing[group.name] + self._cost.fixed[group.name]
        return {
            "bytes_per_token": number(per_token),
            "bytes_per_token_per_layer": number(
                per_token / group.num_layers if per_token and group.num_layers else None
            ),
            "window_cap_bytes": number(window_cap_bytes(group)),
            "state_bytes": state_bytes(group),
            "distinct_shards": self._shards[group.name] if group.is_cached else None,
            "checkpoint_bytes": self._of_one.get(group.name) if group.is_cached else None,
            "host_bytes": held if self._cost and group.is_cached else None,
            "share": shares.get(group.name),
        }

    def sums(self) -> dict[str, Any]:
        """Returns what the whole cache costs: the keys that follow `host` in the document."""
        one, every = self._sequence(dict.fromkeys(self._shards, 1)), self._sequence(self._shards)
        return {
            "window_cap_bytes": one["window_cap_bytes"],
            "state_bytes_per_sequence": one["state_bytes_per_sequence"],
            "per_rank": one,
            "per_host": {"ranks": self._ranks} | every,
            "checkpoints": {
                "rule": self.chosen.rule,
                "source": self._source,
                "checkpoint_tokens": self.chosen.checkpoint_tokens,
                "positions": list(self.chosen.positions) or None,
                "default_checkpoint_tokens": self._default,
                "bytes_per_checkpoint": sum(self._of_one.values()) if self._of_one else None,
                "bytes_per_token": {
                    rule: number(account.bytes_per_token()) if account else None
                    for rule, account in self.accounts.items()
                },
            },
            "share_tokens": self.share_tokens,
            "request": self._request(),
        }

    def host(self, budget_bytes: int) -> dict[str, int]:
        """Returns the longest prefix whose chunks a budget holds, all of one rank.

        Raises:
            ValueError: the budget is out of range.
        """
        return {"budget_bytes": budget_bytes, "tokens": tokens_that_fit(self._cut, self._units, budget_bytes)}

    def host_by_checkpoints(self, budget_bytes: int) -> dict[str, Any]:
        """Returns what a budget holds of every rank of the host, by each choice of checkpoints: the longest
        request, and how many of the given length.

        Raises:
            ValueError: the budget is out of range.
        """
        return {rule: account and self._held(rule, account, budget_bytes) for rule, account in self.accounts.items()}

    def _held(self, rule: str, account: HostAccount, budget_bytes: int) -> dict[str, Any]:
        tokens = None if rule == "listed" else account.longest(budget_bytes)
        cost = None if tokens is None else account.cost(tokens)
        length = self._request_tokens
        return {
            "tokens": tokens,
            "growing_bytes": cost and cost.growing_bytes,
            "fixed_bytes": cost and cost.fixed_bytes,
            "requests": None if length is None else account.requests(budget_bytes, length),
        }

    def _request(self) -> dict[str, Any] | None:
        length = self._request_tokens
        if length is None:
            return None
        costs = {rule: account and account.cost(length) for rule, account in self.accounts.items()}
        on_device = sum(device_bytes(self._layout, length).values())
        return {
            "num_tokens": length,
            "device_bytes_per_rank": on_device,
            "device_bytes_per_host": on_device * self._ranks,
            "by_checkpoints": {
                rule: cost
                and {"bytes": cost.num_bytes, "growing_bytes": cost.growing_bytes, "fixed_bytes": cost.fixed_bytes}
                for rule, cost in costs.items()
            },
        }

    def _sequence(self, shards: Mapping[str, int]) -> dict[str, Any]:
        groups = [(group, shards[group.name]) for group in self._layout.groups]
        caps = (cap * kept for group, kept in groups if (cap := window_cap_bytes(group)) is not None)
        return {
            "bytes_per_token_growing": number(bytes_per_token_growing(self._layout, shards)),
            "window_cap_bytes": number(sum(caps, Fraction(0))),
            "state_bytes_per_sequence": sum((state_bytes(group) or 0) * kept for group, kept in groups),
        }


def words(checkpoints: Checkpoints) -> str:
    """Returns a choice of checkpoints for people."""
    match checkpoints.rule:
        case "dense":
            return "at every chunk"
        case "every":
            return f"every {checkpoints.checkpoint_tokens:,} tokens and at the end"
        case "listed":
            return f"at {', '.join(f'{position:,}' for position in sorted(set(checkpoints.positions)))} and at the end"
    return "at the end only"


def _chosen(checkpoints: Choice, default: int | None, request_tokens: int | None) -> Checkpoints:
    if isinstance(checkpoints, tuple):
        if request_tokens is None:
            raise ValueError("`checkpoints` are positions of a request, and need `request_tokens`, its length")
        listed = Checkpoints("listed", positions=checkpoints)
        listed.check_within(request_tokens)
        return listed
    if checkpoints == "auto":
        return Checkpoints("every", default) if default else Checkpoints("end")
    if isinstance(checkpoints, str):
        return Checkpoints(checkpoints)
    return Checkpoints("every", integer(checkpoints, "checkpoint_tokens", at_least=1))
