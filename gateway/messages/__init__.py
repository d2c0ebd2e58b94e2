"""The gateway's own form of every message that it reads or writes, and how large each may be.

Owns types and figures; nothing here acts. Knows no protobuf: `api/` and `peers/` convert.
"""
