"""Makes the inputs: altered messages of a method's request type, and corrupted bytes.

Owns the inputs, by a seed. An input starts as an example, if its type has one, or as an empty
message. A few fields are set to values at and beyond their limits, to other enum values, to unusual
texts, to many elements or none. The bytes of some are then changed: bits flipped, pieces cut,
repeated or exchanged, lengths made absurd. Types are known by their descriptors only, so new fields
and methods are fuzzed at once; examples make it more likely to pass a service's first check.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from servicekit.channels.limits import MAX_RECEIVE_BYTES
from tandem.v1 import drafter_pb2, gateway_pb2, limits_pb2, sampling_pb2, verifier_pb2

#: A drafter that verifiers may talk to, and that is never there.
ABSENT_DRAFTER = "127.0.0.1:1"

#: A span that no service has made.
TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

# One in `_RARELY` repeated fields is filled to its limit or one beyond. Limits over `_LARGE` are
# used once in `_RARELY_LARGE` times, else `_LARGE`.
_RARELY = 25
_LARGE = 5_000
_RARELY_LARGE = 20
# For fields without a limit.
_SOME_LIMIT = 1_000

_INTEGERS = (0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 63, 64, 255, 256, 2047, 2048, 8192, 65_535)
_EDGES = (2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_NEGATIVES = (-1, -2, -(2**31), -(2**63))
_REALS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 100.0, 1e-300, 1e308, float("inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "def add(",
    "\x00",
    "é",
    "\N{SNOWMAN}",
    "\U0001f600",
    "a b " * 50,
    "../../x",
    "%s",
)
_SIGNED = {
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_INT64: 63,
}
_UNSIGNED = {
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}


class MessageMaker:
    """Makes the inputs of one call from one random generator."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def inputs(self, descriptor: Descriptor, *, is_stream: bool) -> list[bytes]:
        """The inputs of a call: one message, or any number for a stream."""
        count = self._draw.choice((0, 1, 2, 3, 5, 8)) if is_stream else 1
        return [self._input(descriptor, index) for index in range(count)]

    def _input(self, descriptor: Descriptor, index: int) -> bytes:
        draw = self._draw
        if draw.random() < 0.03:
            return draw.randbytes(draw.choice((0, 1, 2, 10, 100)))
        message = self._message(descriptor, index)
        for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
            self._alter(message)
        serialized = message.SerializeToString()
        if draw.random() < 0.2:
            for _ in range(draw.choice((1, 1, 2, 5))):
                serialized = self._change_bytes(serialized)
        return serialized

    def _message(self, descriptor: Descriptor, index: int) -> Message:
        example = _EXAMPLES.get(descriptor.full_name)
        if example is not None and self._draw.random() < 0.9:
            return example(self._draw, index)
        return GetMessageClass(descriptor)()

    def _alter(self, message: Message) -> None:
        """Changes one field of the message or of a nested one."""
        positions = list(_positions(message))
        if not positions:
            return
        inside, field = self._draw.choice(positions)
        name = field.name
        if field.is_repeated:
            self._alter_repeated(inside, field)
        elif field.message_type is not None:
            if self._draw.random() < 0.3:
                inside.ClearField(name)
            else:
                getattr(inside, name).CopyFrom(self._message(field.message_type, 1))
        else:
            setattr(inside, name, self._scalar(field))

    def _alter_repeated(self, inside: Message, field: FieldDescriptor) -> None:
        draw = self._draw
        count = self._count(field)
        held: Any = getattr(inside, field.name)
        if field.message_type is None:
            inside.ClearField(field.name)
            # Of very many elements, most are equal.
            some = [self._scalar(field) for _ in range(min(count, 8))]
            held.extend(some)
            if field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
                held.extend(some[:1] * (count - len(some)))
            else:
                filler = b"x" if field.type == FieldDescriptor.TYPE_BYTES else "x"
                held.extend([filler] * (count - len(some)))
        elif field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            if key.cpp_type == FieldDescriptor.CPPTYPE_STRING:
                keys: list[Any] = [f"{i}" for i in range(count)]
            else:
                keys = (
                    list(range(count)) if count > 8 else [self._scalar(key) for _ in range(count)]
                )
            for each in keys:
                if value.message_type is None:
                    held[each] = self._scalar(value)
        elif not held or draw.random() < 0.5:
            held.add().CopyFrom(self._message(field.message_type, 1))
        else:
            element = draw.choice(held)
            # Within the limit of the transport.
            held.extend([element] * min(count, MAX_RECEIVE_BYTES // (element.ByteSize() + 2)))

    def _count(self, field: FieldDescriptor) -> int:
        draw = self._draw
        if draw.randrange(_RARELY):
            return draw.choice((0, 1, 2, 3, 6, 20))
        limit = field.GetOptions().Extensions[limits_pb2.max_items] or _SOME_LIMIT
        if limit > _LARGE and draw.randrange(_RARELY_LARGE):
            limit = _LARGE
        return limit + draw.choice((-1, 0, 1))

    def _scalar(self, field: FieldDescriptor) -> Any:
        draw, kind = self._draw, field.cpp_type
        if field.enum_type is not None:
            return draw.choice([*(value.number for value in field.enum_type.values), 99, -1])
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return draw.choice(_REALS)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = self._text(field)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        if draw.random() < 0.15:
            return 0
        if draw.random() < 0.5:
            return draw.choice(_INTEGERS)
        if kind in _SIGNED:
            bits = _SIGNED[kind]
            return draw.choice([n for n in _EDGES + _NEGATIVES if -(2**bits) <= n < 2**bits])
        return draw.choice([n for n in _EDGES if n < 2 ** _UNSIGNED[kind]])

    def _text(self, field: FieldDescriptor) -> str:
        draw = self._draw
        if field.name == "sequence_id" and draw.random() < 0.7:
            return _sequence_id(draw)
        if draw.random() < 0.7:
            return draw.choice(_TEXTS)
        limit = field.GetOptions().Extensions[limits_pb2.max_bytes] or _SOME_LIMIT
        if limit > _LARGE and draw.randrange(_RARELY * _RARELY_LARGE):
            limit = _LARGE
        return draw.choice(("x" * limit, "x" * (limit + 1), "é" * (limit // 2)))

    def _change_bytes(self, serialized: bytes) -> bytes:
        draw, changed = self._draw, bytearray(serialized)
        at = draw.randrange(len(changed) + 1)
        end = min(len(changed), at + draw.choice((1, 1, 2, 8, 64)))
        match draw.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end]
            case 3:
                changed[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
            case 4:  # an endless number, or an absurd length
                changed[at:at] = draw.choice((b"\xff" * 5, b"\xff" * 10, b"\x80" * 9 + b"\x01"))
            case _:
                del changed[at:]
        return bytes(changed)


def _positions(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field of the message and of its nested messages, set or not."""
    descriptor: Any = message.DESCRIPTOR
    for field in descriptor.fields:
        yield message, field
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            # The first few of many equal ones suffice.
            for element in getattr(message, field.name)[:4]:
                yield from _positions(element)
        elif message.HasField(field.name):
            yield from _positions(getattr(message, field.name))


# Examples: usual requests that cost little.


def _sequence_id(draw: random.Random) -> str:
    return f"{draw.randrange(400):032x}"


def _tokens(draw: random.Random, max_tokens: int = 24) -> list[int]:
    # Few different tokens, so that texts repeat and drafters find matches.
    return [draw.randrange(8, 24) for _ in range(draw.randrange(1, max_tokens))]


def _sampling(draw: random.Random) -> sampling_pb2.SamplingParams:
    sampling = sampling_pb2.SamplingParams()
    if draw.random() < 0.5:
        sampling.temperature = draw.choice((0.5, 1.0))
        sampling.seed = draw.getrandbits(64)
    if draw.random() < 0.3:
        sampling.top_k, sampling.top_p = draw.choice((0, 1, 40)), 0.9
        sampling.min_p, sampling.repetition_penalty = 0.05, 1.2
        sampling.frequency_penalty, sampling.presence_penalty = 0.5, -0.5
        sampling.logit_bias[draw.randrange(2048)] = -1.0
    if draw.random() < 0.2:
        sampling.logprobs = draw.randrange(4)
    return sampling


def _generate(draw: random.Random, _index: int) -> Message:
    request = gateway_pb2.GenerateRequest(
        max_new_tokens=draw.choice((1, 2, 4)), sampling=_sampling(draw)
    )
    if draw.random() < 0.5:
        request.text = draw.choice(("def add(", "x = 1\n" * 6, "é\N{SNOWMAN}"))
        request.stop_sequences.extend(draw.choice(([], ["\n"], ["a", "bc"])))
        request.report_tokens = draw.random() < 0.3
    else:
        request.tokens.token_ids.extend(_tokens(draw))
    if draw.random() < 0.2:
        request.n = 2
        request.affinity_key = draw.choice("abc")
        request.priority = draw.choice((-1, 0, 1))
    if draw.random() < 0.3:
        request.speculation.num_speculative_tokens = draw.randrange(8)
        request.speculation.pool = draw.choice(("", "shared"))
    if draw.random() < 0.1:
        request.sampling.prompt_logprobs = 1
        request.output_token_ids.extend(_tokens(draw, 3)[: request.max_new_tokens - 1])
    return request


def _session(draw: random.Random, index: int) -> Message:
    request = verifier_pb2.SessionRequest()
    if index == 0:
        request.commands.add().hello.protocol_version = 1
    for _ in range(draw.randrange(4)):
        request.commands.add().CopyFrom(_command(draw, index))
    return request


def _command(draw: random.Random, _index: int) -> verifier_pb2.Command:
    command = verifier_pb2.Command()
    # Few ids, so that commands refer to sequences that others opened.
    sequence_id = f"{draw.randrange(4)}"
    match draw.randrange(6):
        case 0:
            command.close.sequence_id = sequence_id
            command.close.keep = draw.randrange(4)  # type: ignore[assignment]
        case 1:
            command.update.sequence_id = sequence_id
            command.update.drafting = draw.random() < 0.5
            if draw.random() < 0.5:
                command.update.drafter_address = draw.choice(("", ABSENT_DRAFTER, "x:1"))
        case 2 | 3:
            command.draft.sequence_id = sequence_id
            command.draft.base_length = draw.randrange(30)
            command.draft.token_ids.extend(_tokens(draw, 8))
            command.draft.matched_ngram_length = draw.randrange(8)
        case _:
            sampling = _sampling(draw)
            sampling.seed = draw.getrandbits(64)
            command.open.CopyFrom(
                verifier_pb2.Open(
                    sequence_id=sequence_id,
                    token_ids=_tokens(draw),
                    sampling=sampling,
                    max_new_tokens=draw.choice((1, 2, 4)),
                    ignore_eos=True,
                    draft_wait=draw.choice((0, 1, 2, 2, 3)),  # type: ignore[arg-type]
                    cache_salt=draw.choice(("", "a")),
                    tenant_weight=draw.choice((0, 1, 1000, 1001)),
                    trace_parent=draw.choice(("", "", "", TRACE_PARENT, "00-1")),
                )
            )
            if draw.random() < 0.3:
                command.open.drafter_address = ABSENT_DRAFTER
                command.open.ngram.CopyFrom(_ngram_params(draw))
                command.open.hint_tokens = draw.choice((0, 8))
                command.open.keep = draw.randrange(4)  # type: ignore[assignment]
    return command


def _score(draw: random.Random, _index: int) -> Message:
    return verifier_pb2.ScoreRequest(
        sequences=[
            verifier_pb2.ScoreSequence(
                token_ids=_tokens(draw), draft_token_ids=_tokens(draw, 6)[1:]
            )
            for _ in range(draw.randrange(1, 4))
        ],
        top_logprobs=draw.randrange(3),
        prompt_logprobs=draw.random() < 0.3,
        cache_salt=draw.choice(("", "a")),
        method=draw.choice((0, 1, 2)),  # type: ignore[arg-type]
    )


def _propose(draw: random.Random, index: int) -> Message:
    request = drafter_pb2.ProposeRequest(batch_id=index)
    sequence_ids = {_sequence_id(draw) for _ in range(draw.choice((1, 1, 2, 5, 20)))}
    for sequence_id in sorted(sequence_ids):
        delta = request.sequences.add(
            sequence_id=sequence_id,
            base_length=draw.choice((0, 0, 1, 5, 20)),
            token_ids=_tokens(draw, draw.choice((4, 40, 400))),
            max_draft_tokens=draw.choice((0, 8, 64)),
        )
        if not delta.base_length:
            delta.prompt_length = draw.randrange(len(delta.token_ids) + 1)
            delta.params.CopyFrom(_ngram_params(draw))
    if draw.random() < 0.2:
        request.releases.add().CopyFrom(_release(draw, index))
    return request


def _ngram_params(draw: random.Random) -> drafter_pb2.NgramParams:
    params = drafter_pb2.NgramParams(
        overlap=draw.choice((0, 1, 2)),  # type: ignore[arg-type]
        tie=draw.choice((0, 1, 2, 3)),  # type: ignore[arg-type]
        algorithm=draw.choice((0, 1, 2)),  # type: ignore[arg-type]
        pool_id=draw.choice(("", "", "a", "b")),
        pool_min_ngram=draw.randrange(4),
    )
    if draw.random() < 0.4:
        params.min_ngram = draw.choice((1, 2, 3))
        params.max_ngram = draw.choice((3, 5, 32))
    return params


def _release(draw: random.Random, _index: int) -> drafter_pb2.Release:
    return drafter_pb2.Release(
        sequence_id=_sequence_id(draw),
        keep=draw.choice((0, 1, 2, 3)),  # type: ignore[arg-type]
    )


def _releases(draw: random.Random, index: int) -> Message:
    return drafter_pb2.ReleaseRequest(
        releases=[_release(draw, index) for _ in range(draw.randrange(1, 4))]
    )


_EXAMPLES: dict[str, Callable[[random.Random, int], Message]] = {
    "tandem.v1.GenerateRequest": _generate,
    "tandem.v1.SessionRequest": _session,
    "tandem.v1.Command": _command,
    "tandem.v1.ScoreRequest": _score,
    "tandem.v1.ProposeRequest": _propose,
    "tandem.v1.ReleaseRequest": _releases,
    "tandem.v1.Release": _release,
    "tandem.v1.NgramParams": lambda draw, _index: _ngram_params(draw),
    "tandem.v1.SamplingParams": lambda draw, _index: _sampling(draw),
}
