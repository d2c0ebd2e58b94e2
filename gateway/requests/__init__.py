"""From a request as it came in to one that can be run, or an error that names the field.

Owns every rule that a request must keep, the defaults of what it leaves open, and how many
requests are admitted at a time. Knows no transport, no peer and no protobuf.
"""
