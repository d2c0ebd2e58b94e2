"""The form of answers, that real ones are checked against: `answers.py` writes them without models,
since a stream has a chunk per step.
"""

from typing import Literal

import pydantic


class AnswerPart(pydantic.BaseModel, extra="forbid", use_attribute_docstrings=True):
    """A part of an answer."""


class ErrorBody(AnswerPart):
    message: str
    type: str
    param: str | None
    """The parameter at fault."""
    code: str | None


class ErrorAnswer(AnswerPart):
    """The answer to a request that failed; also an event of a stream that failed later."""

    error: ErrorBody


class SamplingDefaults(AnswerPart):
    temperature: float
    top_p: float
    top_k: int
    """0: tokens are sampled from all."""
    min_p: float
    repetition_penalty: float


class ModelCard(AnswerPart):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Extension: most tokens of prompt and output together."""
    sampling_defaults: SamplingDefaults
    """Extension: what requests get that name no value."""
    alias_of: list[str] | None = None
    """Extension: of an alias, its models."""


class ModelList(AnswerPart):
    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(AnswerPart):
    cached_tokens: int
    """Of the prompt, those whose K/V came from the prefix cache."""


class CompletionTokensDetails(AnswerPart):
    reasoning_tokens: int
    """Of the output, those of the model's reasoning."""


class MatchAcceptance(AnswerPart):
    """The drafts of one match length."""

    matched_ngram_length: int
    """64: 64 or more."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class SpeculationUsage(AnswerPart):
    """Extension: how the drafts fared, over all choices."""

    num_steps: int
    """Model steps that sampled, including each choice's first."""
    num_drafts: int
    """Steps that verified drafts."""
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    """Accepted by verified draft tokens."""
    mean_acceptance_length: float | None
    """Tokens per step that verified drafts."""
    accepted_per_position: list[int]
    """Element j: how often the draft at position j was accepted."""
    by_match_length: list[MatchAcceptance]
    num_sequence_drafts: int
    """Of num_drafts, those copied from the request's own tokens."""
    num_pool_drafts: int
    resumes: int
    """How often a choice moved to another verifier."""
    note: str
    """For people: what drafts brought, and if little, why."""


class Usage(AnswerPart):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """Not in `continuous_usage_stats`."""
    completion_tokens_details: CompletionTokensDetails | None = None
    """Likewise."""
    speculation: SpeculationUsage | None = None
    """Likewise."""


class CompletionLogprobs(AnswerPart):
    tokens: list[str]
    """`bytes:\\xe2...`, if a token is no whole character."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ReportedDraft(AnswerPart):
    """A draft that was not accepted."""

    id: int
    text: str
    """What the output's text would have gone on with."""


class ReportedToken(AnswerPart):
    """A token of the output."""

    id: int
    text: str
    """The text that became final with it: empty of special tokens, and while a character or a
    possible stop string is incomplete. Joined, these are the chunk's part of the output.
    """
    accepted: bool
    """Whether it was drafted and accepted; else the model's step made it itself."""


class ChunkSpeculation(AnswerPart):
    """Extension, on request: how the drafts of a chunk's steps fared."""

    num_accepted_tokens: int
    num_draft_tokens: int
    tokens: list[ReportedToken]
    rejected: list[ReportedDraft] | None = None
    """The drafts that were not accepted, in their order, where the operator allows traces."""
    match_length: int | None
    """Of the last step with drafts: so many tokens before them equal those before their source."""
    source: Literal["own", "pool"] | None
    """Where that step's drafts were copied from: the request's own tokens, or its pool."""


FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]


class CompletionChoice(AnswerPart):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    """Extension, on request."""


class Completion(AnswerPart):
    """The answer to a request for completions, or a chunk of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    speculation: ChunkSpeculation | None = None


class TopLogprob(AnswerPart):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerPart):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(AnswerPart):
    name: str
    arguments: str
    """A JSON object, as the model wrote it: not complete, where the model made a mistake or was
    cut off.
    """


class ToolCall(AnswerPart):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(AnswerPart):
    name: str | None = None
    """Where a call begins."""
    arguments: str
    """The next piece; empty where a call begins."""


class ToolCallDelta(AnswerPart):
    """A call begins, with an id, a type and a name, or goes on."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatMessage(AnswerPart):
    role: Literal["assistant"]
    content: str | None
    """null, if the answer is nothing but calls."""
    refusal: None
    reasoning_content: str | None = None
    """What the model wrote before its answer, where that is known."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(AnswerPart):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    """Extension, on request."""


class ChatCompletion(AnswerPart):
    """The answer to a request for a chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(AnswerPart):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(AnswerPart):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    """Extension, on request."""


class ChatCompletionChunk(AnswerPart):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    speculation: ChunkSpeculation | None = None
