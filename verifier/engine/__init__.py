"""The engine thread: one model step after another over all open sequences.

Owns the order of a step, the table of open sequences, the commands that come in and the events
that go out. Knows the model by the `TargetModel` protocol alone, and nothing of gRPC.
"""
