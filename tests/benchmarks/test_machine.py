"""The description of a figure's machine."""

from pathlib import Path

from benchmarks.machine import processor

_CPUINFO = """processor\t: 0
model name\t: Some Processor @ 2.5GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16

processor\t: 1
model name\t: Some Processor @ 2.5GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16
"""


def test_the_processor_is_named_with_the_instructions_that_decide_its_speed(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(_CPUINFO)
    name, cores, features = processor(cpuinfo).split(", ")
    assert name == "Some Processor @ 2.5GHz"
    assert int(cores.removesuffix(" cores")) > 0
    assert features == "avx2 avx512f avx512_bf16"


def test_an_unknown_processor_is_described_as_unknown(tmp_path: Path) -> None:
    assert processor(tmp_path / "absent").endswith("vector instructions unknown")
