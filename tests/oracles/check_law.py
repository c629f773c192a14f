"""Checks `kvjax.coverage` against the slow model on many random layouts.

    python tests/oracles/check_law.py [--layouts N] [--store-layouts N] [--rank-layouts N]
                                      [--seed S] [--jobs N] [--json]

Every instance is made from its own seed, so that a difference is found again with `--seed SEED --layouts 1`.
Exit code 1 if any instance differs.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvjax import _resident, _search
from kvjax.chunking import Chunking
from kvjax.coverage import longest_hit, restorable, store_set, stored_positions
from kvjax.positions import Restorable
from tests.oracles import law
from tests.oracles.layouts import (
    Instance,
    masks,
    random_chunking,
    random_instance,
    random_presence,
    random_ranks,
    seeded,
)

Check = Callable[[int], str | None]

# Seeds that a process takes at a time.
_SEEDS_AT_A_TIME = 200


def found_by(instance: Instance, present: Any, ranks: Sequence[Restorable] = ()) -> law.Expected:
    """What `longest_hit` answers."""
    hit = longest_hit(
        instance.chunking,
        instance.num_tokens,
        present,
        device_tokens=instance.device_tokens,
        resume_multiple=instance.resume_multiple,
        ranks=ranks,
    )
    return law.Expected(hit.hit_tokens, {name: c.tolist() for name, c in hit.load.items()}, hit.limited_by)


def request_of(instance: Instance) -> tuple[Any, ...]:
    """The arguments of the model's functions."""
    return (
        instance.chunking,
        instance.num_tokens,
        instance.present,
        instance.device_tokens,
        instance.resume_multiple,
    )


def hit_difference(instance: Instance, *, as_masks: bool) -> str | None:
    """Says how `longest_hit` differs from the model, for chunks as indices or as masks, or `None`."""
    expected = law.longest_hit(*request_of(instance))
    found = found_by(instance, masks(instance.present) if as_masks else instance.present)
    return None if found == expected else f"expected {expected}, found {found}, {as_masks=}, for {instance}"


def check_hit(seed: int) -> str | None:
    """One lookup, with what the device holds and without, in one span of positions and of chunks or in several."""
    instance = random_instance(seeded(seed))
    as_masks = seed // 4 % 2 == 1
    spans = mock.patch.object(_search, "_FIRST_SPAN", (4096, 1, 3, 8)[seed % 4])
    with spans, mock.patch.object(_resident, "_FIRST_CHUNKS", 1 + seed % 3):
        difference = hit_difference(instance, as_masks=as_masks)
        if difference is None and instance.device_tokens:
            return hit_difference(replace(instance, device_tokens=0), as_masks=not as_masks)
        return difference


def ranks_difference(instances: Sequence[Instance]) -> str | None:
    """Says how the ranks' sets, or the hits that follow from them, differ from the model, or `None`."""
    sets = [
        restorable(
            i.chunking, i.num_tokens, i.present, device_tokens=i.device_tokens, resume_multiple=i.resume_multiple
        )
        for i in instances
    ]
    expected = [law.positions_of_rank(*request_of(instance)) for instance in instances]
    for one, positions, instance in zip(sets, expected, instances, strict=True):
        found = [p for p in range(instance.num_tokens + 1) if p in one]
        if found != sorted(positions) or Restorable.from_bytes(one.to_bytes()) != one:
            return f"expected the positions {sorted(positions)}, found {one}, for {instance}"
    common = set.intersection(*expected)
    if sets[0].intersect(*sets[1:]).largest() != max(common):
        return f"expected the largest common position {max(common)}, found another one, of {sets}"
    for rank, instance in enumerate(instances):
        others = [one for other, one in enumerate(sets) if other != rank]
        hit = law.longest_hit(*request_of(instance), [p for other, p in enumerate(expected) if other != rank])
        found = found_by(instance, instance.present, others)
        if found != hit or found.hit_tokens != max(common):
            return f"expected {hit}, found {found}, for {instance} with {others}"
    return None


def check_ranks(seed: int) -> str | None:
    """One lookup on two or three ranks."""
    with mock.patch.object(_search, "_FIRST_SPAN", (4096, 1, 3, 8)[seed % 4]):
        return ranks_difference(random_ranks(seeded(seed)))


def store_difference(chunking: Chunking, checkpoint: int, multiple: int, missing: law.Chunks) -> str | None:
    """Says how a store set differs from the model, or what is not hit after it, or `None`."""
    case = f"at {checkpoint}, multiple {multiple}, without {missing}, for {chunking}"
    longer, same = law.stored_positions(chunking, checkpoint, multiple, missing)
    positions = stored_positions(chunking, checkpoint, resume_multiple=multiple, missing=missing)
    if positions != (same, longer):
        return f"expected the stored positions {(same, longer)}, found {positions}, {case}"
    chunks = store_set(chunking, checkpoint, resume_multiple=multiple, missing=missing)
    stored = {name: indices.tolist() for name, indices in chunks.items()}
    expected = law.store_set(chunking, checkpoint, multiple, missing)
    if stored != expected:
        return f"expected the store set {expected}, found {stored}, {case}"
    present = {chunking.layout.groups[g].name: chunks[chunking.layout.groups[g].name] for g in chunking.layout.cached}
    for num_tokens, position in ((checkpoint + 1, longer), (checkpoint, same)):
        found = longest_hit(chunking, num_tokens, present, resume_multiple=multiple).hit_tokens
        if found != position:
            return f"after the store, {num_tokens} tokens hit {found}, not {position}, {case}"
    return None


def check_store(seed: int) -> str | None:
    """One checkpoint: what is stored, and that both later requests then hit where they should."""
    pick = seeded(seed)
    chunking, checkpoint, multiple = random_chunking(pick), pick(1, 60), pick(1, 3)
    missing = random_presence(pick, chunking, checkpoint) if pick(0, 2) == 0 else {}
    return store_difference(chunking, checkpoint, multiple, missing)


def with_seed(check: Check, seed: int) -> str | None:
    """One check; its difference, or whatever it raises, tells the seed."""
    try:
        difference = check(seed)
    except Exception as error:
        error.add_note(f"{check.__name__}, seed {seed}")
        raise
    return None if difference is None else f"{check.__name__}, seed {seed}: {difference}"


@contextmanager
def mapped(jobs: int) -> Iterator[Callable[[Callable[[int], str | None], range], Iterator[str | None]]]:
    """A `map` over so many processes, in the order of the seeds."""
    if jobs == 1:
        yield map
        return
    with multiprocessing.Pool(jobs) as pool:
        yield partial(pool.imap, chunksize=_SEEDS_AT_A_TIME)


def run(checks: dict[Check, int], first_seed: int, jobs: int, console: Console) -> dict[Check, list[str]]:
    """Runs each check over so many seeds and returns its differences."""
    found: dict[Check, list[str]] = {check: [] for check in checks}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress, mapped(jobs) as over:
        for check, number in checks.items():
            task = progress.add_task(check.__name__, total=number)
            for difference in over(partial(with_seed, check), range(first_seed, first_seed + number)):
                progress.advance(task)
                if difference is not None:
                    found[check].append(difference)
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs all checks and prints what was found."""
    parser = argparse.ArgumentParser(description="check kvjax.coverage against the slow model")
    parser.add_argument("--layouts", type=int, default=100_000, help="random lookups (default %(default)s)")
    parser.add_argument("--store-layouts", type=int, help="random checkpoints (default: a fifth of --layouts)")
    parser.add_argument("--rank-layouts", type=int, help="lookups on several ranks (default: a fifth of --layouts)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    fifth = max(1, args.layouts // 5)
    stores = fifth if args.store_layouts is None else args.store_layouts
    ranks = fifth if args.rank_layouts is None else args.rank_layouts
    console = Console(stderr=True)
    found = run({check_hit: args.layouts, check_store: stores, check_ranks: ranks}, args.seed, args.jobs, console)
    differences = [difference for listed in found.values() for difference in listed]
    for difference in differences[:5]:
        console.print(difference, markup=False, highlight=False)
    hit, store, rank = map(len, found.values())
    if args.json:
        counts = {"layouts": args.layouts, "hit_differences": hit}
        counts |= {"store_layouts": stores, "store_differences": store}
        print(json.dumps(counts | {"rank_layouts": ranks, "rank_differences": rank}))
    else:
        print(
            f"{args.layouts} lookups: {hit} differ; {stores} checkpoints: {store} differ; "
            f"{ranks} lookups on several ranks: {rank} differ"
        )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
