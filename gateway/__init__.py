"""The gateway: opens requests at verifiers, names their drafters, streams tokens to clients.

Read `coordinator.py` first: what happens when a step's events arrive. Then follow one request:

    api/           gRPC and HTTP; `frontend.py`: one request from its admission to its last output
    page/          the page at `/`, which calls the OpenAI API as any client does
    requests/      from a request as it came in to one that can be run
    text/          text to tokens and back
    routing/       which verifier and which drafter; the sequences open there
    peers/         one stream to each verifier
    generation/    each choice's tokens, text and usage; when clients are served
    messages/      the gateway's own form of every message

`server.py` and `config.py` put everything together; `errors.py` and `metrics.py` serve all rooms.
"""
