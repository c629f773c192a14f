"""Checks `kvjax.coverage` against the slow model on many random layouts.

    python tests/oracles/check_law.py [--layouts N] [--store-layouts N] [--seed S] [--json]

Every instance is made from its own seed, so that a difference is found again with `--seed SEED --layouts 1`.
Exit code 1 if any instance differs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvjax import coverage
from kvjax.chunking import Chunking
from kvjax.coverage import longest_hit, store_set, stored_positions
from tests.oracles import law
from tests.oracles.layouts import Instance, random_chunking, random_instance, random_presence, seeded


def hit_difference(instance: Instance) -> str | None:
    """Says how `longest_hit` differs from the model, or `None`."""
    request = (instance.chunking, instance.num_tokens, instance.present)
    expected = law.longest_hit(*request, instance.device_tokens, instance.resume_multiple)
    hit = longest_hit(*request, device_tokens=instance.device_tokens, resume_multiple=instance.resume_multiple)
    found = law.Expected(hit.hit_tokens, {name: c.tolist() for name, c in hit.load.items()}, hit.limited_by)
    return None if found == expected else f"expected {expected}, found {found}, for {instance}"


def check_hit(seed: int) -> str | None:
    """One lookup, with what the device holds and without, in one span of positions or in several."""
    instance = random_instance(seeded(seed))
    alone = Instance(instance.chunking, instance.num_tokens, instance.present, 0, instance.resume_multiple)
    with mock.patch.object(coverage, "_FIRST_SPAN", (4096, 1, 3, 8)[seed % 4]):
        return hit_difference(instance) or (hit_difference(alone) if instance.device_tokens else None)


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


def run(title: str, check: Callable[[int], str | None], seeds: range, console: Console) -> list[str]:
    """Runs one check over all seeds and returns the differences, each with its seed."""
    found = []
    for seed in track(seeds, description=title, console=console):
        difference = check(seed)
        if difference is not None:
            found.append(f"seed {seed}: {difference}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs both checks and prints what was found."""
    parser = argparse.ArgumentParser(description="check kvjax.coverage against the slow model")
    parser.add_argument("--layouts", type=int, default=100_000, help="random lookups (default %(default)s)")
    parser.add_argument("--store-layouts", type=int, help="random checkpoints (default: a fifth of --layouts)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    stores = max(1, args.layouts // 5) if args.store_layouts is None else args.store_layouts
    console = Console(stderr=True)
    hits = run("hits", check_hit, range(args.seed, args.seed + args.layouts), console)
    sets = run("store sets", check_store, range(args.seed, args.seed + stores), console)
    for difference in (hits + sets)[:5]:
        console.print(difference, markup=False, highlight=False)
    counts = {"layouts": args.layouts, "hit_differences": len(hits)}
    counts |= {"store_layouts": stores, "store_differences": len(sets)}
    if args.json:
        print(json.dumps(counts))
    else:
        print(f"{args.layouts} lookups: {len(hits)} differ; {stores} checkpoints: {len(sets)} differ")
    return 1 if hits or sets else 0


if __name__ == "__main__":
    sys.exit(main())
