"""sglang-jax's server with kvjax's host pool: `python -m kvjax.serving.sglang_jax`, then its own options."""

from kvjax.serving.sglang_jax import install

# The server's scheduler is a new process, which imports this module again: it must do this there, too.
install()

if __name__ == "__main__":
    from sgl_jax.launch_server import main  # pyright: ignore[reportMissingImports]

    main()
