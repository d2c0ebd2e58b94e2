"""What clients call: gRPC and HTTP, and one request's life from its admission to its last answer.

Owns the adapters to each transport, the conversion of client messages, and the call that a client
waits on. Each API is an adapter around `frontend.Frontend`. Does not know how a verifier or a
drafter is reached.
"""
