"""Which models the own decoder serves, by flags and checkpoint; and that torch stays out."""

import mmap
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servicekit.config import ConfigError
from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from tests.verifier.cpu.test_loader import save
from verifier.config import VerifierConfig
from verifier.model import own_model
from verifier.model.memory import choose_num_kv_blocks
from verifier.model.own_model import find_own, load_own

_LOAD = """
import sys
from pathlib import Path
from verifier.build import load_model
from verifier.config import VerifierConfig
import verifier.server, verifier.__main__

loaded = load_model(VerifierConfig(model=Path(sys.argv[1]), device="cpu", num_kv_blocks=8))
assert loaded.served.numerics == "strict"
assert loaded.served.dtype == "bfloat16"
print(*{"torch", "transformers", "safetensors"} & sys.modules.keys())
"""


def config_for(folder: Path = MODEL_FOLDER, **options: Any) -> VerifierConfig:
    return VerifierConfig(model=folder, **{"device": "cpu", "num_kv_blocks": 8, **options})


def test_neither_torch_nor_transformers_enters_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(MODEL_FOLDER)],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    "options",
    [
        {"numerics": "fast"},
        {"attention_backend": "sdpa"},
        {"tensor_parallel_size": 2},
        {"device": "cuda"},
    ],
)
def test_flags_that_ask_for_transformers_get_it(options: dict[str, Any]) -> None:
    assert find_own(config_for()) is not None
    assert find_own(config_for(**options)) is None


def test_a_model_that_is_not_known_goes_to_transformers_unless_flags_forbid(
    tmp_path: Path,
) -> None:
    save(tmp_path, "llama")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"silu"', '"relu"'))
    assert find_own(config_for(tmp_path)) is None
    with pytest.raises(ConfigError, match=r"numerics.*activation relu"):
        find_own(config_for(tmp_path, numerics="strict"))


def test_flags_that_ask_for_more_memory_than_there_is_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = find_own(config_for())
    assert described is not None
    with pytest.raises(ConfigError, match="--num-kv-blocks: 1000000000 blocks take"):
        load_own(config_for(num_kv_blocks=10**9), described)

    limits = resource.getrlimit(resource.RLIMIT_AS)

    def choose_and_limit(*arguments: Any, **options: Any) -> int:
        # Only what the decoder itself allocates fails.
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), limits[1]))
        return choose_num_kv_blocks(*arguments, **options)

    monkeypatch.setattr(own_model, "choose_num_kv_blocks", choose_and_limit)
    try:
        with pytest.raises(
            ConfigError, match=r"--max-num-batched-tokens: 1048576, with .*allocate"
        ):
            load_own(config_for(max_num_batched_tokens=1 << 20), described)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_block_sizes_must_be_multiples_of_16() -> None:
    described = find_own(config_for())
    assert described is not None
    with pytest.raises(ConfigError, match="24: must be a multiple of 16"):
        load_own(config_for(block_size=24), described)
