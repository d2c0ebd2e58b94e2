"""What a lying drafter answers, by kind."""

from collections.abc import Callable

from tandem.v1 import drafter_pb2 as pb
from tests.verifier.drafters.scripted_drafter import Answer, appended, no_match, proposing


def _proposal(**fields: object) -> Answer:
    def propose(delta: pb.SequenceDelta) -> pb.Proposal:
        proposal = appended(delta, status=pb.STATUS_OK, token_ids=[5] * delta.max_draft_tokens)
        for name, value in fields.items():
            if isinstance(value, list):
                del proposal.token_ids[:]
                proposal.token_ids.extend(value)
            else:
                setattr(proposal, name, value)
        return proposal

    return proposing(propose)


def _batch(change: Callable[[pb.ProposeResponse], object]) -> Answer:
    def answer(request: pb.ProposeRequest) -> list[bytes]:
        response = pb.ProposeResponse.FromString(no_match(request)[0])
        change(response)
        return [response.SerializeToString()]

    return answer


#: By name; "end" and "silence" are told by `ScriptedDrafter`'s attributes.
LIES: dict[str, Answer] = {
    "wrong drafts": _proposal(),
    "wrong sequence ids": _proposal(sequence_id="another"),
    "too many tokens": _proposal(token_ids=[5] * 50),
    "huge base length": _proposal(base_length=2**32 - 1),
    "no base length": _proposal(base_length=0),
    "outside the vocabulary": _proposal(token_ids=[2**32 - 1, 2048]),
    "huge match": _proposal(matched_ngram_length=2**32 - 1),
    "unknown status": _proposal(status=9),
    "out of sync for ever": _proposal(status=pb.STATUS_OUT_OF_SYNC),
    "knows more than it was sent": _proposal(status=pb.STATUS_OUT_OF_SYNC, known_length=2**32 - 1),
    "invalid": _proposal(status=pb.STATUS_INVALID, message="no"),
    "indexing for ever": _proposal(status=pb.STATUS_INDEXING, token_ids=[]),
    "too few proposals": _batch(lambda response: response.ClearField("proposals")),
    "too many proposals": _batch(lambda response: response.proposals.add()),
    "another batch": _batch(lambda response: setattr(response, "batch_id", 1 << 40)),
    "garbage": lambda request: [b"\xff\xfe garbage"],
    "nothing in it": lambda request: [b""],
    "5 MiB": lambda request: [b"\x00" * (5 << 20)],
    "more than the transport takes": lambda request: [b"\x00" * (6 << 20)],
    "twice": lambda request: no_match(request) * 2,
    "a thousand times": lambda request: no_match(request) * 1000,
    "silence": lambda request: [],
    "end": no_match,
}

#: Kinds that are no fault: the drafter is only wrong, or of no use.
HONEST_KINDS = {
    "wrong drafts",
    "too many tokens",
    "outside the vocabulary",
    "huge match",
    "indexing for ever",
    # Down and up again, a stream at a time.
    "end",
}
