"""Writes docs/api.md: the reference of the gRPC services, made of the .proto files.

After a change of these:

    python -m tests.repository.grpc_page
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FieldOptions,
    FileDescriptorProto,
    FileDescriptorSet,
    MessageOptions,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tandem.v1 import limits_pb2

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "docs" / "api.md"

# What clients call comes first.
_FILES = ("gateway", "sampling", "verifier", "drafter", "limits")

_HEAD = """\
# The gRPC API

Made of the comments and options of `protos/tandem/v1/` by `python -m tests.repository.grpc_page`. \
[quickstart_grpc.md](quickstart_grpc.md) has examples.

Every field of a request that can grow has a limit, such as *at most 256 bytes*. A call beyond it \
ends with INVALID_ARGUMENT and the field's name, before any work. An `optional` field tells an \
absent value from 0.

"""

# Numbers of the fields of FileDescriptorProto, DescriptorProto and others, of which the path to a
# comment consists (descriptor.proto, SourceCodeInfo.Location).
_SYNTAX, _FILE_MESSAGE, _FILE_ENUM, _SERVICE = 12, 4, 5, 6
_FIELD, _NESTED_ENUM, _ONEOF, _METHOD, _VALUE = 2, 4, 8, 2, 2

_Place = tuple[int, ...]


class _Comments:
    """The comments of one file, by the place of what they describe."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._texts = {
            tuple(location.path): location.leading_comments or location.trailing_comments
            for location in file.source_code_info.location
        }

    def text(self, place: _Place) -> str:
        """The comment as Markdown: its lines joined to paragraphs and list items."""
        lines = [line.removeprefix(" ").rstrip() for line in self._texts.get(place, "").split("\n")]
        text = "\n".join(lines).strip()
        return re.sub(r"(?<!\n)\n(?!\n|- )\s*", " ", re.sub(r"\n *- ", r"\n- ", text))


def render() -> str:
    files = _read_files()
    parts = [_HEAD]
    for name in _FILES:
        file = files[f"tandem/v1/{name}.proto"]
        comments = _Comments(file)
        parts.append(f"## {name}.proto\n\n{_paragraph(comments.text((_SYNTAX,)))}")
        for index, service in enumerate(file.service):
            parts += _service(service, comments, (_SERVICE, index))
        for index, message in enumerate(file.message_type):
            parts += _message(message, comments, (_FILE_MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            parts += _enum(enum, comments, (_FILE_ENUM, index))
    return "".join(parts).rstrip() + "\n"


def _read_files() -> dict[str, FileDescriptorProto]:
    """The parsed .proto files with their comments, by name."""
    protos = REPOSITORY / "protos"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "descriptors"
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={protos}",
                f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
                "--include_source_info",
                f"--descriptor_set_out={made}",
                *(str(path) for path in sorted(protos.glob("tandem/v1/*.proto"))),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        files = FileDescriptorSet.FromString(made.read_bytes()).file
    return {file.name: file for file in files}


def _service(service: ServiceDescriptorProto, comments: _Comments, place: _Place) -> Iterator[str]:
    yield f"### {service.name}\n\n{_paragraph(comments.text(place))}"
    for index, method in enumerate(service.method):
        asked = "stream of " * method.client_streaming + _link(method.input_type)
        answered = "stream of " * method.server_streaming + _link(method.output_type)
        yield f"#### rpc {method.name}\n\n{asked} → {answered}\n\n"
        yield _paragraph(comments.text((*place, _METHOD, index)))


def _message(message: DescriptorProto, comments: _Comments, place: _Place) -> Iterator[str]:
    yield f"### {message.name}\n\n{_paragraph(comments.text(place))}"
    limits = _limits(message.options)
    yield _paragraph(f"{', '.join(limits).capitalize()}." if limits else "")
    shown_oneof = None
    for index, field in enumerate(message.field):
        oneof = None
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = field.oneof_index
            if oneof != shown_oneof:
                comment = comments.text((*place, _ONEOF, oneof))
                yield _bullet(f"one of `{message.oneof_decl[oneof].name}`", comment)
        shown_oneof = oneof
        comment = comments.text((*place, _FIELD, index))
        described = ", ".join((_kind(field, message), *_limits(field.options)))
        described += " each" * (
            _is_repeated(field) and field.options.HasExtension(limits_pb2.max_bytes)
        )
        yield "  " * (oneof is not None) + _bullet(f"`{field.name}`, {described}", comment)
    yield "\n" * bool(message.field)
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*place, _NESTED_ENUM, index))


def _enum(enum: EnumDescriptorProto, comments: _Comments, place: _Place) -> Iterator[str]:
    yield f"### {enum.name}\n\n{_paragraph(comments.text(place))}"
    for index, value in enumerate(enum.value):
        yield _bullet(f"`{value.name}`", comments.text((*place, _VALUE, index)))
    yield "\n"


def _kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Label and type, with a link to a type of ours."""
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
            key, value = nested.field
            return f"map of {_kind(key, message)} to {_kind(value, message)}"
    kind = _link(field.type_name)
    if not field.type_name:
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return "repeated " * _is_repeated(field) + "optional " * field.proto3_optional + kind


def _is_repeated(field: FieldDescriptorProto) -> bool:
    return field.label == FieldDescriptorProto.LABEL_REPEATED


def _limits(options: FieldOptions | MessageOptions) -> Sequence[str]:
    """The limits of a field or a message, in words."""
    words = {
        limits_pb2.max_items.number: "at most {:,} elements",
        limits_pb2.max_bytes.number: "at most {:,} bytes",
        limits_pb2.max_message_bytes.number: "the whole message at most {:,} bytes",
    }
    return [
        words[option.number].format(value)
        for option, value in options.ListFields()
        if option.number in words
    ]


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _bullet(subject: str, comment: str) -> str:
    return f"- {subject}{': ' * bool(comment)}{' '.join(comment.split())}\n"


def _paragraph(text: str) -> str:
    return f"{text}\n\n" if text else ""


if __name__ == "__main__":
    FILE.write_text(render())
