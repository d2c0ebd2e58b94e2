"""What of a JSON schema is enforced, ignored and refused; and the schema as the library gets it.

The library keeps less than it accepts: it may begin what nothing can end, and count a repeated key
twice. So a schema is read here first. What comes out says the same, in words that the library
keeps; what cannot be said so is refused, with the place in the schema and what to write instead.
Start at `reader.py`. Needs nothing but llguidance: a process of its own imports it.
"""
