"""A model as transformers defines it: loaded from a checkpoint, and run over the paged K/V cache.

Knows nothing of flags, memory or the engine: it implements `batch.target_model.TargetModel`.
"""
