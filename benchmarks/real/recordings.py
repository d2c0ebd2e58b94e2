"""Recorded answers: the prompts' tokens, the answers' tokens, and the likeliest tokens of each.

A file per kind of prompt, arrays in `numpy`'s format behind LZMA, which stores what prompts share
once. The texts are Python's own (PSF License); the answers are a model's.
"""

import io
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.generic)

FOLDER = Path(__file__).parent / "recordings"
#: How many of the likeliest tokens are kept.
NUM_TOP = 3
# A logprob is kept as a byte: so many to a nat, -16 at least.
_STEPS_PER_NAT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One greedy answer.

    Attributes:
        conversation: whose turns come one after the other; those of no other have its number.
        prompt_token_ids, output_token_ids: [P] and [N] uint32; a stop token included.
        top_token_ids: the likeliest first, [N, NUM_TOP] uint32.
        top_logprobs: theirs, to 1/16, -16 at least; [N, NUM_TOP] float32.
    """

    conversation: int
    prompt_token_ids: npt.NDArray[np.uint32]
    output_token_ids: npt.NDArray[np.uint32]
    top_token_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]


def write_recordings(path: Path, recordings: Sequence[Recording]) -> None:
    """Writes a file. Raises ValueError if a token id needs more than 16 bits."""
    fields = {
        "prompt_token_ids": [each.prompt_token_ids for each in recordings],
        "output_token_ids": [each.output_token_ids for each in recordings],
        "top_token_ids": [each.top_token_ids for each in recordings],
    }
    arrays = {name: np.concatenate(parts) for name, parts in fields.items()}
    for name, array in arrays.items():
        if array.max(initial=0) >= 1 << 16:
            raise ValueError(f"{name}: {array.max()} needs more than 16 bits")
    nats = np.concatenate([each.top_logprobs for each in recordings])
    file = io.BytesIO()
    np.savez(
        file,
        conversations=np.array([each.conversation for each in recordings], dtype=np.uint16),
        lengths=np.array(
            [(len(each.prompt_token_ids), len(each.output_token_ids)) for each in recordings],
            dtype=np.uint16,
        ),
        top_logprobs=np.clip(np.rint(-nats * _STEPS_PER_NAT), 0, 255).astype(np.uint8),
        allow_pickle=False,
        **{name: array.astype(np.uint16) for name, array in arrays.items()},
    )
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def read_recordings(path: Path) -> list[Recording]:
    """In the order of their turns."""
    arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False)
    prompt_lengths, output_lengths = arrays["lengths"].astype(np.int64).T
    prompts = _parts(arrays["prompt_token_ids"].astype(np.uint32), prompt_lengths)
    outputs = _parts(arrays["output_token_ids"].astype(np.uint32), output_lengths)
    top_token_ids = _parts(arrays["top_token_ids"].astype(np.uint32), output_lengths)
    logprobs = arrays["top_logprobs"].astype(np.float32) / -_STEPS_PER_NAT
    return [
        Recording(
            conversation=int(conversation),
            prompt_token_ids=prompt,
            output_token_ids=output,
            top_token_ids=top,
            top_logprobs=of_top,
        )
        for conversation, prompt, output, top, of_top in zip(
            arrays["conversations"],
            prompts,
            outputs,
            top_token_ids,
            _parts(logprobs, output_lengths),
            strict=True,
        )
    ]


def _parts(array: npt.NDArray[Number], lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[Number]]:
    return np.split(array, np.cumsum(lengths)[:-1])
