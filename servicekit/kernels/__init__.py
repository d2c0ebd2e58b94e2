"""How kernels are compiled (`jit.py`; `linked.py`: as parts of those that call them), for other
processors than the building one, too (`ship.py`), and logged (`compile_log.py`); and how they
access memory by address (`memory.py`).

Does not know what any kernel computes.
"""
