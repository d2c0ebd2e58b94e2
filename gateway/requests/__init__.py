"""From a request as it came in to one that can be run, or an error that names the field.

Owns who may make a request, every rule that it must keep, the defaults of what it leaves open, and
how many requests are admitted at a time. Knows no transport, no peer and no protobuf.
"""
