"""What the documentation takes from the code; `docs/make.py` writes it."""
