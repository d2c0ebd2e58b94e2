"""Checks of a call's responses, for any input.

Owns the promises of the contract that a client can check: responses belong to their requests,
positions are contiguous, and no event follows the end of a sequence.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

# Messages of any type.
_Messages = Sequence[Any]


class AnswerError(Exception):
    """A response breaks the contract."""


def check_answers(path: str, requests: _Messages, answers: _Messages, *, is_complete: bool) -> None:
    """Checks the answers to one call of the method at `path`.

    Args:
        path: `/package.Service/Method`.
        requests: the valid messages, up to the first invalid one.
        answers: the responses.
        is_complete: the call ended with OK.

    Raises:
        AnswerError: a response breaks the contract; the message says how.
    """
    check = _CHECKS.get(path)
    if check is not None:
        check(requests, answers, is_complete)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise AnswerError(problem)


def _check_generate(requests: _Messages, answers: _Messages, is_complete: bool) -> None:
    if not requests:
        _require(not answers, "an answer without a request")
        return
    (request,) = requests
    _require(not answers or answers[0].WhichOneof("event") == "started", "no Started first")
    num_choices = request.n if request.HasField("n") else 1
    offsets: dict[int, int] = {}
    finished = set()
    for answer in answers[1:]:
        kind = answer.WhichOneof("event")
        _require(kind in ("chunk", "finished"), f"{kind} in between")
        event = getattr(answer, kind)
        choice = event.choice_index
        _require(choice < num_choices, f"choice {choice} of {num_choices}")
        offset = offsets.setdefault(choice, len(request.output_token_ids))
        _require(choice not in finished, f"choice {choice} continues after its end")
        if kind == "finished":
            _require(event.finish_reason != 0, "no finish reason")
            _require(event.usage.output_tokens == offset, "usage differs from the tokens")
            finished.add(choice)
        else:
            if event.token_ids:
                _require(event.offset == offset, f"offset {event.offset}")
            offsets[choice] = offset + len(event.token_ids)
    if is_complete:
        _require(len(finished) == num_choices, f"{len(finished)} of {num_choices} finished")


def _check_session(requests: _Messages, answers: _Messages, is_complete: bool) -> None:
    # A sequence opened twice may be refused and also continue.
    num_opens = Counter(
        command.open.sequence_id
        for request in requests
        for command in request.commands
        if command.HasField("open")
    )
    lengths: dict[str, int] = {}
    ended = set()
    for index, answer in enumerate(answers):
        for event in answer.events:
            kind = event.WhichOneof("event")
            body = getattr(event, kind)
            if kind == "drafter_status":
                _require(bool(body.drafter_address and body.state), "a status says nothing")
                continue
            _require((kind == "welcome") == (index == 0), f"{kind} in answer {index}")
            if kind == "welcome":
                continue
            sequence_id = body.sequence_id
            if not sequence_id:  # of a command without a sequence
                _require(kind == "rejected", f"{kind} of nobody's")
                continue
            _require(num_opens[sequence_id] > 0, f"{kind} of a sequence that was not opened")
            if num_opens[sequence_id] > 1:
                continue
            _require(sequence_id not in ended, f"{kind} after the end")
            if kind == "rejected":
                _require(body.code != 0 and body.message != "", "refused without a reason")
                ended.add(sequence_id)
            elif kind == "decided":
                length = lengths.get(sequence_id, body.base_length)
                _require(body.base_length == length, f"base_length {body.base_length}")
                lengths[sequence_id] = length + len(body.token_ids)
                _require(body.num_accepted_tokens <= body.num_draft_tokens, "accepted too many")
                if body.finish_reason:
                    ended.add(sequence_id)


def _check_propose(requests: _Messages, answers: _Messages, is_complete: bool) -> None:
    _require(len(answers) <= len(requests), "more answers than requests")
    _require(len(answers) == len(requests) or not is_complete, "an answer is missing")
    for request, answer in zip(requests, answers, strict=False):
        _require(answer.batch_id == request.batch_id, "another batch's answer")
        asked = [delta.sequence_id for delta in request.sequences]
        _require([p.sequence_id for p in answer.proposals] == asked, "other sequences")
        for delta, proposal in zip(request.sequences, answer.proposals, strict=True):
            _require(proposal.status != 0, "no status")
            num_tokens = len(proposal.token_ids)
            _require(num_tokens <= delta.max_draft_tokens, "a longer draft than requested")
            _require("internal" not in proposal.message, proposal.message)


def _check_score(requests: _Messages, answers: _Messages, is_complete: bool) -> None:
    for request, answer in zip(requests, answers, strict=False):
        _require(len(answer.sequences) == len(request.sequences), "other sequences")
        for asked, scored in zip(request.sequences, answer.sequences, strict=True):
            num_scored = 0 if scored.unscored_reason else len(asked.draft_token_ids)
            _require(len(scored.positions) == num_scored + 1, "other positions")


_CHECKS: dict[str, Callable[[_Messages, _Messages, bool], None]] = {
    "/tandem.v1.GenerationService/Generate": _check_generate,
    "/tandem.v1.VerifierService/Session": _check_session,
    "/tandem.v1.VerifierService/Score": _check_score,
    "/tandem.v1.DrafterService/Propose": _check_propose,
    "/tandem.v1.DrafterService/ProposeStream": _check_propose,
}
