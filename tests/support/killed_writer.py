"""A process that writes entries to a folder until it is killed: `python -m tests.support.killed_writer URL SEED`."""

import sys

from kvjax.tiers import open_tier
from tests.support.entries import Entry, entry, later

NUM_ENTRIES = 24


def entries_of(seed: int) -> list[Entry]:
    """What the process of that seed writes."""
    return [entry(1000 * seed + i, 300_000) for i in range(NUM_ENTRIES)]


def main(url: str, seed: int) -> None:
    entries = entries_of(seed)
    tier = open_tier(url)
    print("ready", flush=True)
    while True:
        names = [one.name for one in entries]
        for future in tier.put(names, [memoryview(one.frame) for one in entries], deadline=later()):
            future.result()
            print("written", flush=True)
        tier.delete(names, deadline=later()).result()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
