"""Slots over many steps: counts and reuse against adjustments counted anew; and what a
step queues.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.verifier.gpu_sampling.device_batches import DEVICE, assert_equal, staged_of
from tests.verifier.sampling.sampling_cases import Case, rows_of, some_case, verified_by_host
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.gpu.sampling.kernels import choice, cut, rows
from verifier.gpu.sampling.sampler import DeviceSampler
from verifier.gpu.sampling.token_counts import TokenCounts
from verifier.sampling import Sampling

# The interpreter computes in numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCAB_SIZE = 70
PENALIZED = Sampling(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)


def test_counts_are_those_of_the_tokens_through_any_history() -> None:
    """Against a count of everything, after every few changes."""
    draw = np.random.default_rng(1)
    counts = TokenCounts(num_slots=3, vocab_size=VOCAB_SIZE, device=DEVICE)
    known: list[list[int] | None] = [None, None, None]
    prompts = [4, 0, 9]
    for _ in range(300):
        slot = int(draw.integers(3))
        token_ids, prompt_length = known[slot], prompts[slot]
        action = draw.random()
        if token_ids is not None and action < 0.1:
            counts.clear(slot)
            known[slot] = None
        else:
            more = draw.integers(-1, VOCAB_SIZE + 2, int(draw.integers(0, 8))).tolist()
            if token_ids is None:
                token_ids = draw.integers(0, VOCAB_SIZE, prompt_length).tolist()
            known[slot] = token_ids = token_ids + more
            counts.count(slot, token_ids, prompt_length=prompt_length)
        if draw.random() < 0.5:
            continue
        counts.flush()
        for i, tokens in enumerate(known):
            expected = np.zeros(VOCAB_SIZE, dtype=np.int64)
            for place, token_id in enumerate(tokens or []):
                if 0 <= token_id < VOCAB_SIZE:
                    if place < prompts[i]:
                        expected[token_id] |= 1
                    else:
                        expected[token_id] += 2
            np.testing.assert_array_equal(counts.table[i].cpu().numpy(), expected)


def test_sequences_of_many_steps_that_come_and_go() -> None:
    """Slots are reused with other parameters."""
    draw = np.random.default_rng(2)
    sampler = DeviceSampler(device=DEVICE, vocab_size=VOCAB_SIZE, max_num_seqs=4, max_num_drafts=3)
    running: dict[int, Case] = {}
    for _ in range(interpreted_cases(12, 40)):
        if running and draw.random() < 0.3:
            slot = int(draw.choice(list(running)))
            del running[slot]
            sampler.close(slot)
        while len(running) < 4 and draw.random() < 0.7:
            case = some_case(draw, VOCAB_SIZE, 0)
            if draw.random() < 0.5:
                case.sampling = dataclasses.replace(
                    PENALIZED, temperature=1.0, seed=int(draw.integers(100))
                )
                case.masks = None
            slot = sampler.open(
                case.sampling, prompt_length=len(case.prompt), stop_token_ids=case.stop_token_ids
            )
            running[slot] = case
        for case in running.values():
            num_drafts = int(draw.integers(4))
            case.drafts = draw.integers(0, VOCAB_SIZE, num_drafts).tolist()
            case.logits = torch.from_numpy(draw.normal(size=(num_drafts + 1, VOCAB_SIZE))).float()
            if case.masks is not None:
                case.masks = np.repeat(case.masks[:1], num_drafts + 1, axis=0)
        cases = list(running.values())
        if not cases:
            continue
        sampler.stage([staged_of(case, slot) for slot, case in running.items()])
        sampler.run(rows_of(cases).to(DEVICE))
        verdict = sampler.result()
        assert_equal(verdict, verified_by_host(cases))
        for case, tokens in zip(cases, verdict.output_token_ids.tolist(), strict=True):
            case.output += [token_id for token_id in tokens if token_id >= 0]


class _Launches:
    """Stands in for a kernel; notes the grids and addresses that it is launched with."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self._name, self._log = name, log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **sizes: Any) -> None:
            places = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
            self._log.append((self._name, grid, places, sizes))

        return launch


class _Operations(TorchDispatchMode):
    """Notes the operations of torch that are queued."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_queues_the_same_whatever_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels, at the same addresses, and no operation that allocates."""
    log: list[Any] = []
    for module, name in [
        (rows, "adjust_rows"),
        (rows, "weigh_rows"),
        (cut, "cut_rows"),
        (choice, "race_rows"),
        (choice, "decide"),
    ]:
        monkeypatch.setattr(module, name, _Launches(name, log))
    sampler = DeviceSampler(device=DEVICE, vocab_size=50, max_num_seqs=3, max_num_drafts=2)
    logits = torch.zeros(9, 50, device=DEVICE)
    steps = []
    for sampling in [Sampling(), PENALIZED, Sampling(temperature=1.0, top_k=3, top_p=0.5)]:
        case = Case(sampling=sampling, prompt=[1], output=[], drafts=[2, 3], logits=logits[:3])
        slots = [sampler.open(sampling, prompt_length=1) for _ in range(3)]
        sampler.stage([staged_of(case, slot) for slot in slots])
        log.clear()
        with _Operations() as operations:
            sampler.run(logits)
        for slot in slots:
            sampler.close(slot)
        steps.append((list(log), operations.names))
    assert steps[0] == steps[1] == steps[2]
    launches, names = steps[0]
    assert len(launches) == 5
    views = {"aten.view.dtype", "aten.slice.Tensor", "aten.alias.default", "aten.detach.default"}
    assert set(names) <= {*views, "aten.copy_.default"}, names
