"""`python -m kvjax` is the `kvjax` command."""

from kvjax.cli.main import entry

if __name__ == "__main__":
    entry()
