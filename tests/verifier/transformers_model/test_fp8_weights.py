"""FP8 weights: quantised values, and the layers that have them."""

import pytest
import torch
from torch.nn.functional import linear

from tests.verifier.conftest import MODEL_FOLDER
from tests.verifier.paged_model import CPU, NUM_BLOCKS, PagedModel, make_small_model, some_tokens
from verifier.gpu.fp8 import FP8, TORCH_ROW_OPERATIONS, quantised, widened
from verifier.parity.transformers_check import make_reference
from verifier.transformers_model import fp8_weights
from verifier.transformers_model.checkpoint import load_checkpoint, reference_logits
from verifier.transformers_model.fp8_weights import Fp8Linear, quantise_linear_layers, rounds_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_VALUE = torch.arange(256, dtype=torch.uint8).view(FP8)
NUMBERS = EVERY_VALUE[~EVERY_VALUE.float().isnan()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.125, 2.0**-8])
def test_every_value_is_widened_as_torch_does(dtype: torch.dtype, scale: float) -> None:
    row = widened(NUMBERS[None], torch.full((1, 1), scale), dtype)[0]
    assert row.dtype is dtype
    assert torch.equal(row, (NUMBERS.float() * scale).to(dtype))


def test_a_weight_becomes_the_nearest_value_at_its_channels_scale() -> None:
    weight = torch.randn(200, 32) * torch.logspace(-6, 3, 200)[:, None]
    values, scale = quantised(weight)
    candidates = NUMBERS.float() * scale  # [200, values]
    nearest = (weight[:, :, None] - candidates[:, None]).abs().amin(dim=-1)
    error = (widened(values, scale, torch.float32) - weight).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_multiplies_by_the_widened_weights(dtype: torch.dtype) -> None:
    ordinary = torch.nn.Linear(24, 16).to(dtype)
    layer = Fp8Linear(ordinary)
    rows = torch.randn(8, 24).to(dtype)
    expected = linear(rows, widened(*quantised(ordinary.weight), dtype), ordinary.bias)
    assert torch.equal(layer(rows), expected)
    close = ordinary(rows)
    assert (layer(rows) - close).abs().max() <= 0.1 * close.abs().max()


def test_rows_are_quantised_and_rescaled_by_kernels_where_triton_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/gpu compares its bits with torch's."""
    monkeypatch.setattr(fp8_weights, "row_operations_for", lambda device: device.type)
    for device, lack, chosen in (
        ("cpu", None, "cpu"),
        ("cpu", "no C compiler", "cpu"),
        ("cuda", None, "cuda"),
        ("cuda", "no C compiler", TORCH_ROW_OPERATIONS),
    ):
        monkeypatch.setattr(fp8_weights, "lack_of_triton", lambda lack=lack: lack)
        assert fp8_weights._row_operations(torch.device(device)) == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_transformers_own_attention(dtype: torch.dtype) -> None:
    model = make_small_model("qwen3", dtype).model
    assert quantise_linear_layers(model, CPU) == 14
    paged = PagedModel(model)
    token_ids = some_tokens(530, paged.vocab_size)
    blocks = list(range(NUM_BLOCKS))[::-1]
    rows = paged.run_in_chunks(token_ids, [180, 1, 2, 3, 8, 310, 5, 1], blocks)
    expected = reference_logits(model, token_ids)
    tolerance = (1e-5 if dtype is torch.float32 else 0.05) * expected.abs().max().item()
    torch.testing.assert_close(rows, expected, rtol=0, atol=tolerance)


def test_a_model_that_multiplies_in_fp8_is_near_the_one_that_widens() -> None:
    folder_model = load_checkpoint(MODEL_FOLDER, dtype="float32", device=CPU, quantization="fp8")
    token_ids = some_tokens(40, folder_model.vocab_size)
    widening = reference_logits(folder_model.model, token_ids)
    for module in folder_model.model.modules():
        if isinstance(module, Fp8Linear):
            module.rounds_rows = True
    assert rounds_rows(folder_model.model)
    in_fp8 = make_reference(folder_model.model, token_ids, multiplies_in_fp8=True)
    assert in_fp8.exact is not None
    torch.testing.assert_close(torch.from_numpy(in_fp8.exact), widening, rtol=0, atol=1e-3)
    apart = (torch.from_numpy(in_fp8.logits) - widening).abs().mean()
    assert 0 < apart < 0.1 * widening.std()
    # The context has left the layers as they were.
    assert rounds_rows(folder_model.model)
