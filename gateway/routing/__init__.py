"""Which verifiers and drafters there are, and which of them a request goes to.

Owns the choice, the models served, the judgement that a verifier makes no progress, and how another
one goes on. Does not know how tokens flow.
"""
