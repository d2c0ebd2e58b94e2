"""The gRPC service: RPCs, sessions, the conversion of messages, flow control, liveness.

Knows the engine by its commands and events alone: nothing of scheduling, of models or of tensors
except those of a `Score` response.
"""
