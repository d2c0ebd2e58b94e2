"""A drafter's handling of positions, in lists and dicts, as the wire contract describes it.

An oracle for the messages of clients: it keeps the histories that it received and makes no drafts.
"""

from tandem.v1 import drafter_pb2 as pb


class DrafterModel:
    """Answers requests; `known` has the tokens of each sequence."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}
        self.created: list[pb.SequenceDelta] = []
        self.num_tokens_received = 0

    def answer(self, request: pb.ProposeRequest) -> pb.ProposeResponse:
        assert request.ByteSize() <= 1 << 20
        assert len(request.sequences) <= 4096
        return pb.ProposeResponse(
            batch_id=request.batch_id,
            proposals=[self._answer_one(delta) for delta in request.sequences],
        )

    def _answer_one(self, delta: pb.SequenceDelta) -> pb.Proposal:
        assert len(delta.token_ids) <= 8192
        self.num_tokens_received += len(delta.token_ids)
        proposal = pb.Proposal(sequence_id=delta.sequence_id, status=pb.STATUS_OUT_OF_SYNC)
        known = self.known.get(delta.sequence_id, [])
        token_ids = list(delta.token_ids)
        if delta.base_length == 0:
            self.created.append(delta)
            known = self.known[delta.sequence_id] = []
        elif delta.base_length > len(known):
            proposal.known_length = len(known)
            return proposal
        overlap = known[delta.base_length :]
        if token_ids[: len(overlap)] != overlap[: len(token_ids)]:
            return proposal
        known += token_ids[len(overlap) :]
        proposal.status = pb.STATUS_NO_MATCH if delta.max_draft_tokens else pb.STATUS_OK
        proposal.base_length = len(known)
        return proposal
