import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

# The examples are scripts with a package beside them, as a reader runs them.
sys.path.insert(0, str(EXAMPLES))
