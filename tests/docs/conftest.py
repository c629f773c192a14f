import sys
from pathlib import Path

# `docs/make.py` is a script with a package beside it, as `python docs/make.py` runs it.
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
