"""Long random walks over an offloader with tiers: `python -m tests.benchmarks.tiered_walks --walks 150 --json`."""

import argparse
import itertools
import json
import logging
from collections import Counter

from kvjax.observe.progress import progress_bar
from tests.support.tiered_walk import TieredWalk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400, help="of each walk")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.getLogger("kvjax").setLevel(logging.CRITICAL)  # it tells of every fault
    kinds = list(itertools.product(["direct", "staged"], [400, 2000, 4000], ["through", "back"]))
    seen: Counter[str] = Counter()
    with progress_bar("walks", args.walks) as advance:
        for seed in range(args.first_seed, args.first_seed + args.walks):
            transfer, host_bytes, write = kinds[seed % len(kinds)]
            walk = TieredWalk(seed, transfer=transfer, host_bytes=host_bytes, write=write)
            try:
                walk.walk(args.steps)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            seen.update(walk.seen)
            advance(1)
    print(json.dumps(dict(seen)) if args.json else "\n".join(f"{name}: {value}" for name, value in seen.items()))


if __name__ == "__main__":
    main()
