"""One choice of a request while it is generated: its tokens, text, usage, and unread output.

Owns that state, and when it is shown to clients. Knows no transport, no peer and no metrics.
"""
