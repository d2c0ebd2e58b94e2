"""The tiles that suit a processor."""

from verifier.cpu.processor import AVX2, AVX512, NEON, unsupported_reason


def test_the_tiles_sums_fit_in_the_registers() -> None:
    """With a broadcast input and the weights of one tile's blocks beside them."""
    for tiles, num_registers, lanes in ((AVX512, 32, 16), (AVX2, 16, 8), (NEON, 32, 4)):
        for rows in range(1, tiles.max_rows + 1):
            registers_per_sum = 16 // lanes
            num_sums = rows * tiles.num_blocks(rows) * registers_per_sum
            assert num_sums < num_registers, (tiles.name, rows)


def test_this_processor_is_supported() -> None:
    assert unsupported_reason() is None
