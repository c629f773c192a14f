"""Parts of `continuous_batching.py`."""
