"""How ranks tell each other things."""

from typing import Protocol


class RanksError(RuntimeError):
    """The ranks of a model can no longer decide together. All of them must be made anew."""


class RankLostError(RanksError):
    """Nothing came from one or several ranks in time.

    Args:
        ranks: those, ascending; empty if nobody can tell.
        message: says which ranks, in what, after how long.
    """

    def __init__(self, ranks: tuple[int, ...], message: str):
        super().__init__(message)
        self.ranks = ranks


class RanksDifferError(RanksError):
    """The ranks did not make the same calls in the same order, or one of them failed where the others did not."""


class Channel(Protocol):
    """Lets ranks exchange a few bytes. It takes no part in the work of their devices.

    Attributes:
        rank: number of this rank, from 0.
        num_ranks: how many there are.
    """

    rank: int
    num_ranks: int

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Gives `payload` to all ranks, and returns what each of them gave, by rank, this one among them.

        All ranks make the same number of calls. It returns when all have made this one.

        Args:
            payload: what to give.
            timeout_s: how long to wait for the others, in seconds.

        Raises:
            RankLostError: nothing came from one of them in time.
        """
        ...
