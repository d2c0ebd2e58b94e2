"""From a request's body to the gateway's own requests: its form, its checks, messages and tools.

Knows nothing of answers.
"""
