"""What is refused beside values out of range, by which field; and which defaults are filled in."""

import dataclasses
from typing import Any, get_args

import pytest

from gateway.errors import InvalidRequestError, UnsupportedFieldError
from gateway.messages.request import AcceptedRequest, GenerateRequest
from gateway.messages.response import Model
from gateway.requests.acceptance import RequestDefaults, accept, cache_salt, find_model, pool_id
from gateway.requests.drafting_policy import TANDEM
from gateway.requests.validation import check_request
from tandem.values import SamplingParams, SpeculationParams, Tie

MODEL = Model(
    model_id="model",
    model_digest="",
    vocab_size=100,
    max_model_len=64,
    max_num_speculative_tokens=7,
    num_verifiers=1,
)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"prompt_token_ids": [1, 2, 3], **fields})


def sampling(**fields: Any) -> GenerateRequest:
    return request(sampling=SamplingParams(**fields))


def speculation(**fields: Any) -> GenerateRequest:
    return request(speculation=SpeculationParams(**fields))


def accepted(
    made: GenerateRequest,
    *,
    defaults: RequestDefaults | None = None,
    tenant: str = "",
    **model: Any,
) -> AcceptedRequest:
    check_request(made, has_tokenizer=True)
    return accept(
        made,
        prompt_token_ids=made.prompt_token_ids or [5] * len(made.text or ""),
        model=dataclasses.replace(MODEL, **model),
        defaults=defaults or RequestDefaults(),
        tenant=tenant,
    )


# `tests/integration/test_parameters.py` has the ranges of parameters.
INVALID = [
    ("prompt", request(prompt_token_ids=None)),
    ("text", request(prompt_token_ids=None, text="")),
    ("tokens.token_ids", request(prompt_token_ids=[])),
    ("tokens.token_ids", request(prompt_token_ids=[1, 100])),
    ("tokens.token_ids", request(prompt_token_ids=[1] * 64)),
    ("text", request(prompt_token_ids=None, text="x" * 64)),
    ("max_new_tokens", request(max_new_tokens=0)),
    ("output_token_ids", request(output_token_ids=[100])),
    ("output_token_ids", request(output_token_ids=[5] * 3, max_new_tokens=3)),
    ("output_token_ids", request(output_token_ids=[5] * 61)),
    ("stop_sequences[1]", request(stop_sequences=["a", ""])),
    ("stop_token_ids", request(stop_token_ids=[100])),
    ("n", request(num_choices=0)),
    ("n", request(num_choices=17)),
    ("sampling.logit_bias", sampling(logit_bias={100: 1.0})),
    ("sampling.prompt_logprobs", sampling(prompt_logprobs=1 << 17)),
    ("speculation.num_speculative_tokens", speculation(num_speculative_tokens=8)),
    ("speculation.num_speculative_tokens", speculation(enabled=False, num_speculative_tokens=8)),
    ("speculation.prompt_lookup_min", speculation(prompt_lookup_min=4, prompt_lookup_max=3)),
    ("speculation.prompt_lookup_min", speculation(prompt_lookup_min=6)),
    ("speculation.tokens_per_match", speculation(tie="latest", tokens_per_match=2)),
    ("speculation.pool_min_ngram", speculation(pool_min_ngram=2)),
    ("speculation.hint_tokens", speculation(hint_tokens=0)),
    ("speculation.hint_tokens", speculation(hint_tokens=65)),
    ("speculation.pool_keep", speculation(pool_keep="output")),
    ("speculation.pool_keep_cancelled", speculation(pool_keep_cancelled=True)),
    (
        "speculation.pool_keep_cancelled",
        speculation(pool="p", pool_keep="nothing", pool_keep_cancelled=True),
    ),
    ("priority", request(priority=2**31)),
    ("priority", request(priority=-(2**31) - 1)),
]


@pytest.mark.parametrize(("field", "made"), INVALID)
def test_an_invalid_value_is_refused_by_field(field: str, made: GenerateRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        accepted(made)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "made",
    [
        request(request_id="x" * 256),
        request(prompt_token_ids=[99] * 63),
        request(stop_sequences=["x" * 256] * 16),
        request(stop_token_ids=[99] * 64),
        request(num_choices=16),
        request(output_token_ids=[5] * 60),
        request(priority=2**31 - 1),
        request(priority=-(2**31)),
    ],
)
def test_values_at_the_limits_are_accepted(made: GenerateRequest) -> None:
    accepted(made)


def test_whatever_concerns_text_needs_a_tokenizer() -> None:
    for field, made in (
        ("text", GenerateRequest(text="hello")),
        ("stop_sequences", request(stop_sequences=["x"])),
        ("report_tokens", request(report_tokens=True)),
    ):
        check_request(made, has_tokenizer=True)
        with pytest.raises(UnsupportedFieldError) as caught:
            check_request(made, has_tokenizer=False)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("wanted", "given"), [(None, 61), (1, 1), (61, 61), (62, 61), (2**32 - 1, 61)]
)
def test_max_new_tokens_is_bounded_by_the_model(wanted: int | None, given: int) -> None:
    assert accepted(request(max_new_tokens=wanted)).max_new_tokens == given


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SpeculationParams(), 4),
        (SpeculationParams(enabled=True), 4),
        (SpeculationParams(enabled=False), 0),
        (SpeculationParams(enabled=False, num_speculative_tokens=3), 0),
        (SpeculationParams(num_speculative_tokens=0), 0),
        (SpeculationParams(num_speculative_tokens=7), 7),
    ],
)
def test_num_speculative_tokens_of_a_request(params: SpeculationParams, expected: int) -> None:
    policy = dataclasses.replace(TANDEM, num_speculative_tokens=4)
    made = accepted(request(speculation=params), defaults=RequestDefaults(drafting=policy))
    assert made.num_speculative_tokens == expected
    assert made.wants_drafts == (expected > 0)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SpeculationParams(), 31),
        (SpeculationParams(tokens_per_match=4), 31),
        (SpeculationParams(tokens_per_match=0), 7),
        (SpeculationParams(tie="earliest"), 7),
        (SpeculationParams(tie="earliest", num_speculative_tokens=20), 20),
    ],
)
def test_many_drafts_are_the_default_where_their_number_follows_the_match(
    params: SpeculationParams, expected: int
) -> None:
    made = accepted(request(speculation=params), max_num_speculative_tokens=31)
    assert made.num_speculative_tokens == expected


def test_tokens_per_match_count_only_with_the_longest_match() -> None:
    defaults = RequestDefaults(drafting=dataclasses.replace(TANDEM, tokens_per_match=3))
    asked = {tie: request(speculation=SpeculationParams(tie=tie)) for tie in get_args(Tie)}
    given = {tie: accepted(r, defaults=defaults).ngram.tokens_per_match for tie, r in asked.items()}
    assert given == {"longest": 3, "earliest": 0, "latest": 0}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SpeculationParams(), 64),
        (SpeculationParams(hint_tokens=5), 5),
        (SpeculationParams(num_speculative_tokens=3), 64),
        # The other drafters match anew at every step: no draft is left for the next.
        (SpeculationParams(preset="vllm-kmp"), 7),
        (SpeculationParams(preset="transformers"), 10),
        (SpeculationParams(preset="vllm", num_speculative_tokens=2), 2),
        (SpeculationParams(preset="vllm", hint_tokens=9), 9),
    ],
)
def test_hint_tokens_of_a_request(params: SpeculationParams, expected: int) -> None:
    made = accepted(request(speculation=params), max_num_speculative_tokens=31)
    assert made.hint_tokens == expected


def test_the_model_is_the_one_named_or_the_only_one() -> None:
    other = dataclasses.replace(MODEL, model_id="other")
    assert find_model("", {"model": MODEL}) is MODEL
    assert find_model("other", {"model": MODEL, "other": other}) is other
    for model_id, models in (("what", {"model": MODEL}), ("", {"model": MODEL, "other": other})):
        with pytest.raises(InvalidRequestError) as caught:
            find_model(model_id, models)
        assert caught.value.field == "model_id"


def test_no_tenant_can_name_anothers_pool() -> None:
    assert pool_id("a", "b/c") != pool_id("a/b", "c")
    assert pool_id("a", "x") != pool_id("b", "x")
    assert pool_id("a", "") == ""


def test_no_tenant_shares_anothers_cached_prefixes() -> None:
    salts = {cache_salt(tenant) for tenant in ("", "a", "1:a", "1:a/")}
    assert len(salts) == 4
    assert accepted(request()).cache_salt == cache_salt("")
    named = accepted(request(), tenant="a")
    assert named.cache_salt == cache_salt("a")


def test_the_servers_own_limit_on_prompts_is_kept() -> None:
    accepted(request(), defaults=RequestDefaults(max_prompt_tokens=3))
    with pytest.raises(InvalidRequestError, match="limit of 2") as caught:
        accepted(request(), defaults=RequestDefaults(max_prompt_tokens=2))
    assert caught.value.field == "tokens.token_ids"
