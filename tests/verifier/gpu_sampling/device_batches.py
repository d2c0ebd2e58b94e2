"""Steps of mixed sequences, verified by the host's sampler and by the device's."""

import os
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

from tests.verifier.sampling.sampling_cases import Case, rows_of
from verifier.gpu.sampling.sampler import DeviceSampler, StagedSequence
from verifier.sampling.rejection_sampler import Verdict

# Triton's interpreter runs on the CPU; `tests/gpu` runs the same checks on a GPU.
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def staged_of(case: Case, slot: int | None) -> StagedSequence:
    return StagedSequence(
        slot=slot,
        token_ids=case.token_ids,
        draft_token_ids=case.drafts,
        first_position=len(case.token_ids),
        allowed=None if case.masks is None else case.masks[: len(case.drafts) + 1],
    )


def sampler_of(vocab_size: int, max_num_seqs: int = 6) -> DeviceSampler:
    return DeviceSampler(
        device=DEVICE, vocab_size=vocab_size, max_num_seqs=max_num_seqs, max_num_drafts=4
    )


def verified_by_device(
    sampler: DeviceSampler,
    cases: SequenceOf[Case],
    is_usable: npt.NDArray[np.bool_] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Verdict:
    """Opens a slot for each case, and closes it again."""
    slots = [
        sampler.open(
            case.sampling, prompt_length=len(case.prompt), stop_token_ids=case.stop_token_ids
        )
        for case in cases
    ]
    sampler.stage([staged_of(case, slot) for case, slot in zip(cases, slots, strict=True)])
    usable = None if is_usable is None else torch.from_numpy(is_usable).to(DEVICE)
    sampler.run(rows_of(cases).to(DEVICE, dtype), usable)
    verdict = sampler.result()
    for slot in slots:
        sampler.close(slot)
    return verdict


def assert_equal(device: Verdict, host: Verdict) -> None:
    """Raises AssertionError, which names what differs."""
    np.testing.assert_array_equal(device.output_token_ids, host.output_token_ids)
    np.testing.assert_array_equal(device.num_accepted_tokens, host.num_accepted_tokens)
    np.testing.assert_array_equal(device.is_finite, host.is_finite)
