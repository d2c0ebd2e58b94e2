"""A client's request: as it came in, and as it is run.

Owns both forms; every API speaks in them. `requests/` makes an `AcceptedRequest` of a
`GenerateRequest`; only that is run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.output.parts import Reading
from tandem.values import Keep, NgramParams, SamplingParams, SpeculationParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that the model's chat template writes.

    Attributes:
        messages: each with `role` and `content`.
        tools: JSON schemas of functions; empty: none.
        variables: more variables of the template.
        reasoning_effort: how much the model shall reason; "": the template decides.
        num_bytes: about how large all of it is.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reasoning_effort: str = ""
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request as it came in: nothing in it has been checked.

    Attributes:
        text, prompt_token_ids, conversation: the prompt; at most one of the three is given.
        output_token_ids: output that the client already has.
        expected_model_digest: of the model that must run it; "": any of its name.
        max_new_tokens: counting `output_token_ids`.
        unknown_field: the path of a field that this version does not know; "": it knows all.
    """

    request_id: str = ""
    model_id: str = ""
    text: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    conversation: Conversation | None = None
    output_token_ids: Sequence[int] = ()
    expected_model_digest: str = ""
    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None
    stop_sequences: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    num_choices: int | None = None
    speculation: SpeculationParams = SpeculationParams()
    affinity_key: str = ""
    priority: int = 0
    trace: bool = False
    report_tokens: bool = False
    unknown_field: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """A request that can be run: every value checked, every default filled in.

    Attributes:
        seed: the first choice's; those of the others are derived from it (`requests/seeds.py`).
        max_new_tokens: counting `output_token_ids`; never past the model's limit.
        num_speculative_tokens: the most drafts verified per step; 0: no drafts.
        hint_tokens: the most draft tokens requested from its drafter at a time.
        pool_keep: which part of its text its pool keeps.
        vocab_size: the model's; every token id is below it.
        pool_keep_cancelled: whether its pool keeps the text even if it is cancelled or fails.
        priority: higher first.
        cache_salt: only requests with equal salts share cached prefixes; they are a tenant's.
        tenant_weight: against others', where tenants take turns.
        trace: whether the client gets a trace of every step of the model.
        report_tokens: whether it gets the text of each token.
        reading: what is told apart in the output; None: nothing.
        trace_parent: the span that verifiers are told of; "": none.
        predicted_token_ids: what the output may repeat.
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
    vocab_size: int
    affinity_key: str
    hint_tokens: int
    pool_keep: Keep = Keep.OUTPUT
    priority: int = 0
    cache_salt: str = ""
    tenant_weight: int = 1
    pool_keep_cancelled: bool = False
    trace: bool = False
    report_tokens: bool = False
    reading: Reading | None = None
    trace_parent: str = ""
    predicted_token_ids: Sequence[int] = ()

    @property
    def num_held_tokens(self) -> int:
        """Tokens that it holds while it waits."""
        given = self.prompt_token_ids, self.output_token_ids, self.predicted_token_ids
        return sum(map(len, given))

    @property
    def max_length(self) -> int:
        """Of a choice, in tokens: the prompt and the longest output."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    @property
    def wants_drafts(self) -> bool:
        return self.num_speculative_tokens > 0

    @property
    def is_kept_by_close(self) -> bool:
        """Whether what its pool keeps is not known before all output was searched: a stop string
        may end it earlier than its verifier does.
        """
        has_both = bool(self.ngram.pool_id and self.stop_sequences)
        return has_both and self.pool_keep is not Keep.NOTHING
