"""The OpenAI API over HTTP: `/v1/models`, `/v1/completions`, `/v1/chat/completions`.

Owns the form of its requests, answers and errors, and the document that describes them
(`/openapi.json`). What is not supported is refused by name. Read `service.py` first: one request
from its head to its last byte. `reading/` has the way in, `writing/` the way out. Knows neither
verifiers nor how requests are run: that is `frontend.Frontend`, which gRPC shares.
"""
