"""The search of shapes, cut short."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tiles
from servicekit.kernels.memory import address_of
from verifier.cpu.processor import TILES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shape_is_timed_beside_the_chosen_one(dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    tiles.main(["--quick", "--dtype", dtype, "--rounds", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["chosen"] for row in rows] == [TILES.num_blocks(1), TILES.num_blocks(2)]
    assert all(float(row["1 blocks"].strip("*")) > 0 for row in rows)
    assert sum(row[f"{blocks} blocks"].startswith("**") for row in rows for blocks in (1, 2)) == 2


def test_the_timed_tile_computes_products() -> None:
    draw = np.random.default_rng(3)
    weights = draw.standard_normal((4, 8, 16), dtype=np.float32)
    x = draw.standard_normal((3, 8), dtype=np.float32)
    out = np.zeros((3, 64), dtype=np.float32)
    tiles.compiled_product(3, 2)(
        weights[:0].reshape(-1),
        *(address_of(x), x.strides[0], address_of(weights), weights.strides[0], len(weights), 8),
        *(address_of(out), out.strides[0]),
    )
    expected = np.einsum("rk,bkl->rbl", x, weights).reshape(3, 64)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
