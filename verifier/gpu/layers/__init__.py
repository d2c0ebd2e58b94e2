"""What layers of some families compute beside attention and an MLP.

Knows a layer's weights and the step's rows; nothing of other layers, K/V or the engine.
"""
