"""docs/api.md and docs/openai_reference.md are made of what the servers offer."""

import json
from types import ModuleType

import pytest

from gateway.api.openai.document import openapi_json
from tandem.v1 import drafter_pb2, gateway_pb2, sampling_pb2, verifier_pb2
from tests.repository import grpc_page, openai_page


def section(page: str, heading: str) -> str:
    """The text below a heading, to the next heading."""
    assert f"\n{heading}\n" in page, heading
    return page.partition(f"\n{heading}\n")[2].partition("\n#")[0]


@pytest.mark.parametrize("made", [grpc_page, openai_page])
def test_the_page_is_up_to_date(made: ModuleType) -> None:
    assert made.FILE.read_text() == made.render(), f"run python -m {made.__name__}"


@pytest.mark.parametrize("file", [gateway_pb2, sampling_pb2, verifier_pb2, drafter_pb2])
def test_the_page_has_every_method_field_and_value(file: ModuleType) -> None:
    """Compares the page with the stubs, without its generator."""
    page = grpc_page.FILE.read_text()
    for service in file.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert method.input_type.name in section(page, f"#### rpc {method.name}")
    for message in file.DESCRIPTOR.message_types_by_name.values():
        text = section(page, f"### {message.name}")
        for field in message.fields:
            assert f"- `{field.name}`, " in text, (message.name, field.name)
    enums = [*file.DESCRIPTOR.enum_types_by_name.values()]
    for message in file.DESCRIPTOR.message_types_by_name.values():
        enums += message.enum_types
    for enum in enums:
        text = section(page, f"### {enum.name}")
        assert all(f"- `{value.name}`" in text for value in enum.values), enum.name


def test_the_page_has_the_limits_and_comments_of_a_request() -> None:
    text = section(grpc_page.FILE.read_text(), "### GenerateRequest")
    assert "The whole message at most 4,194,304 bytes." in text
    assert "- `stop_token_ids`, repeated uint32, at most 64 elements: Generation ends after" in text
    assert "  - `tokens`, [TokenIds](#tokenids)" in text


def test_the_page_has_every_path_and_field_of_the_document() -> None:
    document = json.loads(openapi_json())
    page = openai_page.FILE.read_text()
    for path, operations in document["paths"].items():
        assert all(f"- `{method.upper()} {path}`: " in page for method in operations)
    for name, schema in document["components"]["schemas"].items():
        text = section(page, f"## {name}")
        for field in schema.get("properties", ()):
            mark = "**" if field in schema.get("required", ()) else ""
            assert f"- {mark}`{field}`{mark}, " in text, (name, field)
        for member in schema.get("oneOf", ()):
            assert f"[{member['$ref'].rpartition('/')[2]}](#" in text, name
