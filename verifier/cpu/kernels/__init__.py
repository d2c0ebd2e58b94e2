"""The kernels of the decoder for CPUs: `forward.py` is a forward pass, `tiles.py` the inner loop of
all products.

Knows addresses and numbers alone, and checks nothing: `layout_checks.py` has checked the step.
"""
