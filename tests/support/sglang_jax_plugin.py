"""A pytest plugin that runs sglang-jax's own tests with kvjax's host pool: `-p tests.support.sglang_jax_plugin`."""

import os

from kvjax.serving.sglang_jax import install

install(transfer=os.environ.get("TRANSFER", "auto"))
