"""A clock that stands still."""


class Clock:
    """Tells `now`, in seconds, which tests set."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
