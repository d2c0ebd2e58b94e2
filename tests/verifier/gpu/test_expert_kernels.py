"""Mixtures of experts on a GPU: no launch waits for the device. What the kernels compute is tested
by `expert_kernel_checks.py`.
"""

from typing import Any

import pytest
import torch

from tests.verifier.chunks import Chunk
from tests.verifier.gpu.running_decoder import RunningGpuDecoder, load
from tests.verifier.gpu.test_decoder import TEXT, folder_of
from verifier.checkpoint.weight_types import Activation
from verifier.gpu.layers import experts
from verifier.gpu.layers.experts import mix_experts
from verifier.gpu.plain import PlainOperations
from verifier.gpu.weights import Experts, ExpertWeights

META = torch.device("meta")


class Launches:
    """Stands in for a kernel: notes its grids, and launches nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **_: self._check(arguments)

    def _check(self, arguments: tuple[Any, ...]) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        assert tensors
        assert all(each.device == META and each.is_contiguous() for each in tensors)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launches]:
    """Mixtures launch these, whatever the device."""
    from verifier.gpu.kernels import mixture

    names = [name for name in vars(mixture) if name.endswith("_kernel")]
    stand_ins = {name: Launches() for name in names}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(mixture, name, stand_in)
    monkeypatch.setattr(experts, "mixture_for", lambda device: mixture.mix)
    return stand_ins


class ShapesOnly(PlainOperations):
    """Stores no K/V: which is stored depends on values."""

    def rotate_and_store(self, qkv: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(qkv)


@pytest.mark.parametrize("normalises", [False, True])
def test_of_equally_likely_experts_the_first_ones_are_chosen(
    normalises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, whatever the other tokens: bits of a sum depend on it."""
    logits = torch.tensor([[0, 1, 1, 0, 1, 1], [2, 2, 0, 0, 2, 2], [3, 3, 3, 3, 3, 3]]).bfloat16()
    given: list[torch.Tensor] = []

    def mixture(
        rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        given.extend((chosen, weights))
        return rows

    monkeypatch.setattr(experts, "mixture_for", lambda device: mixture)
    nothing = torch.empty(0)
    some = Experts(
        router=lambda rows: logits,
        weights=ExpertWeights(gate_up=nothing, down=nothing),
        num_per_token=3,
        normalises=normalises,
    )
    mix_experts(some, torch.zeros(3, 16), Activation.SILU)
    chosen, weights = given
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 4], [0, 1, 2]]
    assert chosen.is_contiguous()
    assert weights.is_contiguous()
    expected = torch.tensor([[1.0 / 3] * 3] * 3)
    if not normalises:
        expected = logits.float().softmax(dim=-1).amax(dim=-1, keepdim=True).expand(3, 3)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma4_mixture"])
def test_no_layer_waits_for_the_device(name: str, launches: dict[str, Launches]) -> None:
    """Tensors of torch's `meta` device have no values: whatever would be read of one fails."""
    weights = load(folder_of(name), device=META)
    running = RunningGpuDecoder(weights, operations=ShapesOnly())
    step = Chunk(token_ids=TEXT[:13], start=0, block_table=[3], num_rows=1)
    running.decoder.forward_on_device(running.lay_out(step))
    num_mixtures = sum(isinstance(layer.mlp, Experts) for layer in weights.layers)
    assert num_mixtures
    assert {name: len(each.grids) for name, each in launches.items()} == dict.fromkeys(
        launches, num_mixtures
    )
    assert len(launches) == 4


def test_grids_depend_on_the_number_of_tokens_only(launches: dict[str, Launches]) -> None:
    from verifier.checkpoint.weight_types import Activation
    from verifier.gpu.kernels.mixture import mix

    empty = torch.empty
    for num_tokens in (1, 64, 2048):
        mix(
            empty(num_tokens, 64, device=META),
            empty(num_tokens, 8, dtype=torch.int64, device=META),
            empty(num_tokens, 8, device=META),
            ExpertWeights(
                gate_up=empty(128, 2 * 96, 64, device=META),
                down=empty(128, 64, 96, device=META),
            ),
            Activation.SILU,
        )
    # 8 pairs in as many tiles; 512 and 16,384 pairs, each of the 128 experts with a ragged tile.
    assert launches["gate_up_kernel"].grids == [(8, 2), (134, 2), (382, 2)]
    assert launches["down_kernel"].grids == [(8, 1), (134, 1), (382, 1)]
    assert launches["add_experts_kernel"].grids == [(1, 1), (64, 1), (2048, 1)]
