"""The gateway: the front door. It coordinates drafters and verifiers and streams tokens to clients.

A request's way through the modules, from the door inwards:

    service, http         the doors: gRPC; HTTP for metrics and health
    frontend              one request from its admission to its last Finished; knows no transport
    validation            what came in -> what is run, or an error that names the field
    router                which verifier, which drafter
    generation            one choice: its tokens, its text, its usage; owned here and nowhere else
    coordinator           the flow of one verifier step: read this first
    fleet                 the verifiers and drafters that there are
    delivery              clients after hints
    verifier_link         the one Session stream to one verifier     (outbox: what is to be sent)
    drafter_link          the one ProposeStream to one drafter       (draft_feed: likewise)
    peer_stream           a stream that is kept open: one reader, one writer, reconnects
    tokenization, stop_strings, output_text      tokens to text
    wire                  protobuf in and out
    server, config        everything put together
"""
