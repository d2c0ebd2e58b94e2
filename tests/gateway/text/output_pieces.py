"""What readers of outputs make of a text that comes in pieces."""

import itertools
from collections.abc import Sequence

from gateway.text.output.channel_reader import ChannelReader
from gateway.text.output.output_reader import OutputReader
from gateway.text.output.parts import Piece, Read, ReasoningText
from gateway.text.output.tool_call_reader import CallDelta


def reads_of(reader: ChannelReader | OutputReader, pieces: Sequence[str]) -> list[Read]:
    """What comes of pieces, up to a stop string."""
    reads: list[Read] = []
    for piece in pieces:
        reads.append(reader.feed(piece))
        if reader.stopped:
            return reads
    return [*reads, reader.finish()]


def merged(reads: Sequence[Read]) -> list[Piece]:
    """The pieces, those that go on joined; two texts of one kind do not follow each other."""
    joined: list[Piece] = []
    for piece in itertools.chain.from_iterable(read.pieces for read in reads):
        match joined[-1:], piece:
            case [str(before)], str():
                joined[-1] = before + piece
            case [ReasoningText(before)], ReasoningText(text):
                joined[-1] = ReasoningText(before + text)
            case [CallDelta(name, before)], CallDelta(None, arguments):
                joined[-1] = CallDelta(name, before + arguments)
            case _:
                joined.append(piece)
    return joined
