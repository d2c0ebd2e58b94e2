"""The model that is loaded from a checkpoint, checked, and run over the paged K/V cache.

Knows nothing of the engine: it implements `batch.target_model.TargetModel`.
"""
