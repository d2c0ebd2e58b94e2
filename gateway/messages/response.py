"""What a client gets: the events of one request, and the models that there are.

Owns these forms; every API speaks in them.
"""

import dataclasses
from collections.abc import Sequence

from gateway.text.output.parts import Read
from tandem.values import DraftSource, FinishReason, Usage

#: One token's logprob and its alternatives: a serialized `TokenLogprob` of sampling.proto, passed
#: on as the verifier sent it. There are tens of thousands of them: objects, and the garbage
#: collector's passes over them, would keep the event loop busy for too long. Empty for a prompt's
#: first token, which has no logprob.
EncodedLogprob = bytes

#: What one step did: a serialized `StepTrace` of sampling.proto, passed on likewise.
EncodedStep = bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event of a request.

    Attributes:
        model: the one that it runs on.
        prompt_token_ids: those of its text, or as it gave them.
    """

    request_id: str
    seed: int
    model: "Model"
    prompt_token_ids: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One step of the model, before the chunk with its tokens."""

    choice_index: int
    step: EncodedStep


@dataclasses.dataclass(slots=True)
class Step:
    """The output of one verifier step for one sequence.

    Once it is shown, its figures leave out the tokens after a stop string.

    Attributes:
        matched_ngram_length: length of the drafts' match, in tokens; 64: 64 or more.
        source: where the drafts were copied from; None: not known.
        text: of the answer, that became final with this step.
        token_texts: parts of the whole text, one per token, if the request asked for them.
        reads: what each token brought, if the output is told apart; behind them, of the last step
            that which was held back to the end.
    """

    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    matched_ngram_length: int = 0
    source: DraftSource | None = None
    text: str = ""
    token_texts: Sequence[str] = ()
    reads: Sequence[Read] = ()


# Not frozen: with so many fields that takes twice as long, for each message.
@dataclasses.dataclass(slots=True, kw_only=True)
class Chunk:
    """The output of one choice since its last chunk.

    Attributes:
        offset: output tokens of the choice before this chunk.
        token_ids: with the stop token.
        text: of the answer, without the stop token and the stop string.
        num_steps: model steps that the chunk covers.
        logprobs: one per token, if the request asked for them.
        prompt_logprobs: the next of the prompt's, if the request asked for them.
        finish_reason: why the choice ended, on its last chunk.
        steps: those that the chunk covers, in order.
    """

    choice_index: int
    offset: int
    token_ids: Sequence[int]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    logprobs: Sequence[EncodedLogprob] = ()
    prompt_logprobs: Sequence[EncodedLogprob] = ()
    finish_reason: FinishReason | None = None
    steps: Sequence[Step] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of one choice."""

    choice_index: int
    finish_reason: FinishReason
    usage: Usage


GenerateEvent = Started | Traced | Chunk | Finished


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is served, and the narrowest limits among its verifiers.

    Attributes:
        tokenizer_digest: "": unknown.
        allows_trace: whether each of its verifiers traces steps.
        alias_of: of an alias, the ids of its models; it has no digest then.
    """

    model_id: str
    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_speculative_tokens: int
    num_verifiers: int
    tokenizer_digest: str = ""
    allows_trace: bool = False
    alias_of: Sequence[str] = ()
