"""Progress bars for long work, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[float], None]


@contextmanager
def progress_bar(description: str, total: float, *, show: bool | None = None) -> Iterator[Advance]:
    """Shows a bar for work of `total` steps, and yields the function that advances it.

    Args:
        description: what is being done.
        total: steps of the work, in any unit.
        show: `None` shows the bar only where standard error is a terminal.
    """
    console = Console(stderr=True)
    if not (console.is_terminal if show is None else show):
        yield lambda _steps: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)
