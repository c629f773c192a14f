"""From which prompt on a tier pays, measured by an example in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvjax

_SCRIPT = Path(kvjax.__file__).parents[1] / "examples" / "restore_or_compute.py"


def pays_from(url: str, rounds: int) -> dict[str, Any]:
    """Returns what `examples/restore_or_compute.py` measured of a tier, or in `problem` why it could not.

    Args:
        url: of the tier.
        rounds: of which it takes the median.
    """
    if not _SCRIPT.is_file():
        return _failed("kvjax does not run from a checkout, so that there is no example")
    # The URL may hold credentials, and arguments can be seen by others.
    command = [sys.executable, str(_SCRIPT), "--tier", "-", "--rounds", str(rounds), "--json"]
    done = subprocess.run(command, input=url, capture_output=True, text=True, check=False)
    if done.returncode:
        return _failed((done.stderr.strip().splitlines() or ["the example failed"])[-1])
    return {**json.loads(done.stdout), "problem": None}


def _failed(problem: str) -> dict[str, Any]:
    return {"tier": None, "pays_from_tokens": None, "prompts": [], "problem": problem}
