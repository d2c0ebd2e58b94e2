"""One stream to each verifier: connecting, sending, receiving.

Owns the streams, the conversion of their messages, and what waits to be sent. Does not know what
a message means for a request: the coordinator, their listener, does.
"""
