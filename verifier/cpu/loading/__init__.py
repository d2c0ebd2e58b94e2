"""From a checkpoint to the weights of Tandem's own decoder.

Of `model_config` and `refusals`, code outside this repository imports the names by these paths.
"""
