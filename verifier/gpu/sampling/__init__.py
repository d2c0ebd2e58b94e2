"""The sampler on the device of the logits, token for token that of `verifier/sampling/`.

Knows rows of logits and slots of sequences' parameters; nothing of K/V, scheduling or the engine.
"""
