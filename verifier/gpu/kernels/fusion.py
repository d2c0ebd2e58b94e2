"""Whether the compiler may round a product and its sum once instead of twice."""

# Said at each launch: what Triton does unless it is told changes with 3.10, and bits with it.
FUSED = {"enable_fp_fusion": True}
