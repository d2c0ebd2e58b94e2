"""The run of `tandem bench`, how far it is, and its report; the flags are in `bench.py`."""
