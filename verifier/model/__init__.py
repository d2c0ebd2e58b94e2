"""Who computes a checkpoint, in how much memory: chooses a decoder, or transformers, and has it
loaded and checked.

Knows nothing of the engine.
"""
