"""What a client asks for, and what it hears.

Owns the gateway's own form of a request and of its answers; every door (gRPC now, HTTP beside it)
speaks in these. Knows no protobuf. `validation.py` makes an `AcceptedRequest` of a
`GenerateRequest`; only that is run.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence


class FinishReason(enum.IntEnum):
    """Why a choice ended; the wire's numbers."""

    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


class Overlap(enum.IntEnum):
    """Where an earlier occurrence of the last n tokens may lie; the wire's numbers."""

    DEFAULT = 0
    DISJOINT = 1
    ALLOWED = 2


class Source(enum.IntEnum):
    """Where a draft was copied from; the wire's numbers."""

    UNSPECIFIED = 0
    SEQUENCE = 1
    POOL = 2


class Tie(enum.IntEnum):
    """Which of several occurrences is continued; the wire's numbers."""

    DEFAULT = 0
    EARLIEST = 1
    LATEST = 2
    LONGEST = 3


class Algorithm(enum.IntEnum):
    """How occurrences are found; the wire's numbers."""

    DEFAULT = 0
    INDEX = 1
    KMP = 2


class Keep(enum.IntEnum):
    """What of a request's text its pool gets; the wire's numbers."""

    DEFAULT = 0
    NOTHING = 1
    OUTPUT = 2
    ALL = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; None where the client said nothing. See sampling.proto.

    Attributes:
        logprobs_mode: the wire's number, known or not.
        num_beams: 0 or 1; there is no beam search.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    min_new_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: int = 0
    num_beams: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How the request wants to be drafted for; None where the client said nothing.

    Attributes:
        overlap, tie, algorithm, preset, pool_keep: the wire's numbers, known or not.
        hint_tokens: most draft tokens asked for at a time.
        tree_width: 0 or 1; there are no drafts that branch.
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    overlap: int = 0
    tie: int = 0
    tokens_per_match: int | None = None
    algorithm: int = 0
    chained: bool | None = None
    pool: str = ""
    pool_min_ngram: int | None = None
    preset: int = 0
    hint_tokens: int | None = None
    tree_width: int = 0
    pool_keep: int = 0
    pool_feed_tokens: int = 0
    pool_keep_cancelled: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request as it came in: nothing in it has been checked.

    Attributes:
        text, prompt_token_ids: the prompt; of the two the one that was given, or neither.
        output_token_ids: output that the client already has.
        max_new_tokens: counting `output_token_ids`.
        adapter_id, has_media: are refused.
    """

    request_id: str = ""
    model_id: str = ""
    text: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    output_token_ids: Sequence[int] = ()
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None
    stop_sequences: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_choices: int | None = None
    speculation: SpeculationParams = SpeculationParams()
    affinity_key: str = ""
    priority: int = 0
    adapter_id: str = ""
    has_media: bool = False
    trace: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NgramParams:
    """Which earlier text counts as a match, from the shortest n-gram to the longest."""

    min_ngram: int
    max_ngram: int
    overlap: Overlap = Overlap.DEFAULT
    tie: Tie = Tie.DEFAULT
    # Drafts verified per token that the match reaches back. 0: no such limit.
    tokens_per_match: int = 0
    algorithm: Algorithm = Algorithm.DEFAULT
    # Whether a draft goes on past the end of the known text by matching again.
    chained: bool = False
    # The pool is asked when the own match reaches less far. 0: when there is none.
    pool_min_ngram: int = 0
    # Other requests' text to draft from, and to leave this one's in; "": none.
    pool_id: str = ""
    # What of its text.
    pool_keep: Keep = Keep.OUTPUT
    # Every so many tokens, while the request runs; 0: at its end only.
    pool_feed_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """A request that can be run: every value checked, every default filled in.

    Attributes:
        seed: the first choice's; the others' are mixed from it (`seeds.py`).
        max_new_tokens: counting `output_token_ids`; never past the model's limit.
        num_speculative_tokens: most drafts verified per step; 0: this request is not drafted for.
        hint_tokens: most draft tokens that its drafter is asked for at a time.
        max_model_len: the limit that no draft may pass.
        vocab_size: of the model; no token id is as large.
        pool_keep_cancelled: whether its pool gets the text too if it is cancelled or fails.
        has_text: whether the output is told as text too: the gateway's tokenizer is the model's.
        priority: higher first.
        cache_salt: only requests with equal salts share cached prefixes.
        trace: the client is told of every step of the model.
    """

    request_id: str
    model_id: str
    model_digest: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    max_new_tokens: int
    stop_sequences: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_choices: int
    num_speculative_tokens: int
    ngram: NgramParams
    max_model_len: int
    vocab_size: int
    affinity_key: str
    hint_tokens: int
    priority: int = 0
    cache_salt: str = ""
    pool_keep_cancelled: bool = False
    has_text: bool = True
    trace: bool = False

    @property
    def wants_drafts(self) -> bool:
        return self.num_speculative_tokens > 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """First answer."""

    request_id: str
    seed: int
    num_prompt_tokens: int


#: One token's logprob, and those beside it: a `TokenLogprob` of sampling.proto, serialized, as the
#: verifier sent it and as the client gets it. They come by ten thousands: to make objects of all,
#: and to have the garbage collector go through them, would keep the event loop too long.
#: Empty: of a prompt's first token, which follows nothing.
EncodedLogprob = bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What became certain of one choice since its last chunk.

    Attributes:
        offset: output tokens of the choice before this chunk.
        token_ids: with the stop token.
        text: without the stop token and the stop string.
        num_steps: model steps that the chunk covers.
        logprobs: one per token, if the request asked for them.
        prompt_logprobs: the next of the prompt's, if the request asked for them.
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


#: What one step did: a `StepTrace` of sampling.proto, serialized, as the verifier sent it and as
#: the client gets it.
EncodedStep = bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One step of the model, before the chunk with its tokens."""

    choice_index: int
    step: EncodedStep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatchAcceptance:
    """What became of the drafts whose match reached equally far. See gateway.proto."""

    matched_ngram_length: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one choice cost. See gateway.proto."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: Sequence[int]
    resumes: int
    by_match_length: Sequence[MatchAcceptance] = ()
    num_sequence_drafts: int = 0
    num_pool_drafts: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Last answer of one choice."""

    choice_index: int
    finish_reason: FinishReason
    usage: Usage


GenerateEvent = Started | Traced | Chunk | Finished


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that can be asked for, and the narrowest limits among the verifiers that serve it."""

    model_id: str
    model_digest: str
    vocab_size: int
    max_model_len: int
    max_num_speculative_tokens: int
    num_verifiers: int
    # "": unknown, and taken to be the gateway's.
    tokenizer_digest: str = ""
