"""Random sequences of one step with parameters and logits of all kinds, and the host's verdict.

For the sampler of the host and the device's; imports nothing of either's that needs Triton.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tandem.values import StructuredOutput
from verifier.sampling import Sampling
from verifier.sampling.adjustments import Adjustments, MaskArray
from verifier.sampling.logits_processing import History
from verifier.sampling.rejection_sampler import JudgedSequence, Verdict, verify

Draw = np.random.Generator


class FixedMasks:
    """A constraint that is not a grammar: the masks are given."""

    def __init__(self, masks: MaskArray) -> None:
        self._masks = masks

    def allows(self, token_ids: SequenceOf[int]) -> bool:
        return all(
            self._masks[row, token_id // 32] >> token_id % 32 & 1
            for row, token_id in enumerate(token_ids)
        )

    def allowed(self, draft_token_ids: SequenceOf[int]) -> MaskArray:
        return self._masks[: len(draft_token_ids) + 1]


@dataclass(kw_only=True)
class Case:
    """A sequence in one step, and its rows [K + 1, V] float32."""

    sampling: Sampling
    prompt: list[int]
    output: list[int]
    drafts: list[int]
    logits: torch.Tensor
    stop_token_ids: frozenset[int] = frozenset()
    masks: MaskArray | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    def judged(self) -> JudgedSequence:
        adjustments = None
        if self.sampling.adjusts_logits:
            adjustments = Adjustments(
                self.sampling,
                prompt_length=len(self.prompt),
                stop_token_ids=self.stop_token_ids,
                constraint=None if self.masks is None else FixedMasks(self.masks),
            )
            adjustments.count(self.token_ids)
        history = History(adjustments=adjustments, draft_token_ids=self.drafts)
        return JudgedSequence(
            sampling=self.sampling, history=history, first_position=len(self.token_ids)
        )


def some_sampling(draw: Draw, vocab_size: int) -> Sampling:
    bias = draw.integers(0, vocab_size, 3) if draw.random() < 0.3 else ()
    return Sampling(
        temperature=float(draw.choice([0.0, 0.3, 0.8, 1.0, 1.0, 2.5, 1e-300, 1e300])),
        top_k=int(draw.choice([0, 0, 1, 7, vocab_size, vocab_size + 3, max(1, vocab_size // 3)])),
        top_p=float(draw.choice([1.0, 1.0, 0.95, 0.5, 1e-9])),
        min_p=float(draw.choice([0.0, 0.0, 0.02, 1.0])),
        repetition_penalty=float(draw.choice([1.0, 1.3, 0.8])),
        frequency_penalty=float(draw.choice([0.0, 0.4, -0.3])),
        presence_penalty=float(draw.choice([0.0, 0.6])),
        logit_bias={int(i): float(draw.normal()) for i in bias},
        min_new_tokens=int(draw.choice([0, 0, 5])),
        structured_output=StructuredOutput() if draw.random() < 0.2 else None,
        seed=int(draw.integers(0, 2**64, dtype=np.uint64)),
    )


def some_logits(draw: Draw, num_rows: int, vocab_size: int) -> torch.Tensor:
    rows = draw.normal(scale=draw.choice([0.01, 1.0, 4.0, 30.0]), size=(num_rows, vocab_size))
    if draw.random() < 0.4:
        rows = np.round(rows)  # many ties
    if draw.random() < 0.3:
        rows[draw.random(rows.shape) < 0.3] = -np.inf
        rows[:, 0] = 1.0
    if draw.random() < 0.2:
        rows[:, draw.integers(vocab_size)] = -1e30
    if draw.random() < 0.1:
        rows[draw.integers(num_rows), draw.integers(vocab_size)] = draw.choice(
            [np.nan, np.inf, 3e38]
        )
    if draw.random() < 0.05:
        rows[draw.integers(num_rows)] = -np.inf
    return torch.from_numpy(rows).float()


def some_case(draw: Draw, vocab_size: int, max_num_drafts: int) -> Case:
    """Of its drafts, most are what the host samples."""
    num_drafts = int(draw.integers(0, max_num_drafts + 1))
    sampling = some_sampling(draw, vocab_size)
    masks = None
    if sampling.structured_output is not None:
        bits = draw.integers(0, 2**32, (num_drafts + 1, (vocab_size + 31) // 32), dtype=np.uint32)
        masks = bits.view(np.int32)
        if draw.random() < 0.1:
            masks[:] = 0
    case = Case(
        sampling=sampling,
        prompt=draw.integers(0, vocab_size, int(draw.integers(1, 40))).tolist(),
        output=draw.integers(0, vocab_size, int(draw.integers(0, 6))).tolist(),
        drafts=[],
        logits=some_logits(draw, num_drafts + 1, vocab_size),
        stop_token_ids=frozenset(draw.integers(0, vocab_size + 2, 2).tolist()),
        masks=masks,
    )
    for _ in range(num_drafts):
        verdict = verified_by_host([case])
        sampled = int(verdict.output_token_ids[0, len(case.drafts)])
        others = [int(draw.integers(vocab_size)), -1, vocab_size, -(2**62), 2**62]
        other = others[draw.integers(len(others))]
        case.drafts.append(sampled if draw.random() < 0.8 else other)
    return case


def verified_by_host(
    cases: SequenceOf[Case],
    is_usable: npt.NDArray[np.bool_] | None = None,
) -> Verdict:
    """By the rows of each case as they are, as many as it has drafts, and one."""
    return verify(
        rows_of(cases).numpy(),
        [case.judged() for case in cases],
        draft_token_ids=np.array([d for case in cases for d in case.drafts], dtype=np.int64),
        num_draft_tokens=np.array([len(case.drafts) for case in cases], dtype=np.int64),
        is_usable=is_usable,
    )


def rows_of(cases: SequenceOf[Case]) -> torch.Tensor:
    return torch.cat([case.logits[: len(case.drafts) + 1] for case in cases])
