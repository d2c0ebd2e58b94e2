"""The drafts of one sequence: where they are kept, how many are verified, how long one is awaited.

Knows token ids, lengths and durations; nothing of sequences, blocks or models.
"""
