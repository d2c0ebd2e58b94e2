"""From a checkpoint folder to `DecoderWeights`, with numpy alone.

Knows the families of models that this project's decoder computes; knows neither torch nor
transformers, whose defaults it repeats.
"""
