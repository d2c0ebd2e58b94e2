"""A checkpoint folder as the own decoders read it, with numpy alone: its description, its tensors.

Knows the families of models that this project's decoders compute, and what identifies a folder's
contents; knows neither torch nor transformers, whose defaults it repeats, nor packed weights.
"""
