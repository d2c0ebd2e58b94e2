"""The text of an output: what is final, where it stops, what is reasoning, a call or the answer.

Knows texts alone: neither tokens' ids nor who asked.
"""
