"""How kernels are compiled (`jit.py`), and how they access memory by address (`memory.py`).

Does not know what any kernel computes.
"""
