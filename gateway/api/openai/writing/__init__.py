"""From a choice's events to the parts of an answer in OpenAI's form, whole or in chunks.

Knows nothing of bodies and of HTTP.
"""
