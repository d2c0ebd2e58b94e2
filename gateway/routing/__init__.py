"""Which verifiers and drafters there are, and which of them a request goes to.

Owns the choice, the models served, and the judgement that a verifier makes no progress. Does not
know how tokens flow.
"""
