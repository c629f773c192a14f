"""A Gemma-style model and a small paged serving engine, for `gemma_decode.py`."""
