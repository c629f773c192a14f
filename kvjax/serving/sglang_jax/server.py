"""sglang-jax's server with kvjax's host pool: `python -m kvjax.serving.sglang_jax.server`, then its own options.

The server's scheduler is a new process, which imports this module again (of a `__main__.py` Python does not do that):
the pool is installed there, too.
"""

import sys

from kvjax.serving.sglang_jax.installation import install

try:
    install()
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"kvjax: {error}")

if __name__ == "__main__":
    from sgl_jax.launch_server import main  # pyright: ignore[reportMissingImports]

    main()
