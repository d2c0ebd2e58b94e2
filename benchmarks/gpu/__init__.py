"""What the verifier does on a GPU, in one run of a few minutes; see `__main__.py`."""
