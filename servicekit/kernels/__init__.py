"""How kernels are compiled (`jit.py`), how they access memory by address (`memory.py`), and numbers
of protobuf messages (`varints.py`).

Does not know what any kernel computes.
"""
