"""The command line: thin commands over the pure modules, which do the arithmetic."""
