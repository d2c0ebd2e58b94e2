"""Structured output through all services: it parses, and speculation changes none of its tokens."""

import dataclasses
import json

import pytest

from tandem.client import (
    GenerationRequest,
    SamplingParams,
    SpeculationParams,
    StructuredOutput,
)
from tests.integration.prompts import PLAIN
from tests.integration.stack import running_stack, verifier_config

# What the output must echo is in the prompt.
RECORD = {"name": "total", "values": ["price", "tax", "discount"], "is_sum": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["total", "price"]},
        "values": {"const": RECORD["values"]},
        "is_sum": {"type": "boolean"},
    },
    "required": ["name", "values", "is_sum"],
    "additionalProperties": False,
}
PROMPT = f"<|code|>{json.dumps(RECORD)}<|rename|>x<|to|>y<|out|>"


def request(structured: StructuredOutput, **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        prompt=PROMPT,
        max_new_tokens=120,
        sampling=SamplingParams(structured_output=structured, **sampling),  # type: ignore[arg-type]
        speculation=SpeculationParams(),
    )


@pytest.mark.timeout(300)
async def test_structured_output_is_the_same_with_and_without_drafts() -> None:
    schema = StructuredOutput(json_schema=SCHEMA)
    requests = [
        request(schema),
        request(schema, temperature=1.2, seed=3),
        dataclasses.replace(request(schema, temperature=1.2, seed=4), n=2),
        request(StructuredOutput(choices=["price", "total of all prices"])),
        request(StructuredOutput(regex="[a-z]{4,12}( [a-z]{4,12})?"), temperature=1.0, seed=1),
        request(StructuredOutput(lark='start: "values: " /[0-9]{1,4}/ ("," /[0-9]{1,4}/)?')),
    ]
    plain = [dataclasses.replace(each, speculation=PLAIN) for each in requests]
    async with running_stack(verifier=verifier_config(allow_structured_output=True)) as stack:
        drafted = await stack.generate_all(requests, streams=6)
        undrafted = await stack.generate_all(plain, streams=6)
        for one, other in zip(drafted, undrafted, strict=True):
            for choice, same in zip(one.choices, other.choices, strict=True):
                assert choice.token_ids == same.token_ids
                assert choice.finish_reason == "stop"
        for result in drafted[:3]:
            for choice in result.choices:
                value = json.loads(choice.text)
                assert value["values"] == RECORD["values"]
                assert value["name"] in ("total", "price")
        assert drafted[3].text in ("price", "total of all prices")
        # What must come is drafted by the grammar itself.
        assert all(each.usage.num_accepted_tokens > 0 for each in drafted[:3])
        await stack.check_idle()
