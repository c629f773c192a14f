"""What passes between the scheduler's side and the worker's: plans, and what became of them. All of it pickles."""

from dataclasses import dataclass, field

import numpy as np

from kvjax.groups import CacheLayout
from kvjax.plan import LoadPlan, StorePlan


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A move that the worker is to make.

    Args:
        number: names it in the report.
        request_id: whose blocks it moves.
        plan: the moves; `None` for a load that could not be planned: it fails.
    """

    number: int
    request_id: str
    plan: LoadPlan | StorePlan | None


@dataclass(slots=True, eq=False)
class Orders:
    """What the worker is to do in one step.

    Args:
        stores: of what earlier steps wrote; to be issued before this step writes anything.
        loads: for requests that wait for them.
        finished: requests that ended before this step; one that is in it, or loads in it, is another of the same name.
    """

    stores: list[Order] = field(default_factory=list)
    loads: list[Order] = field(default_factory=list)
    finished: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """What the worker's arrays look like.

    Args:
        layout: the groups with their leaves.
        unit_bytes: of the host pool.
        num_blocks: that each group's arrays hold, by name.
    """

    layout: CacheLayout
    unit_bytes: int
    num_blocks: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What became of an order.

    Args:
        number: of the order.
        moved: by `group_idx`, a mask of the rows of its plan; groups that are missing were not moved.
    """

    number: int
    moved: dict[int, np.ndarray]


@dataclass(slots=True, eq=False)
class Report:
    """What a worker tells after a step.

    Args:
        geometry: of its arrays; in its first report.
        outcomes: of orders that ended, each once.
        pool_lost: the host pool died and is empty: nothing that was stored before is there any more.
    """

    geometry: Geometry | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    pool_lost: bool = False

    def __bool__(self) -> bool:
        return self.geometry is not None or bool(self.outcomes) or self.pool_lost
