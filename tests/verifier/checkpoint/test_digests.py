"""What tells checkpoint folders apart."""

import shutil
from pathlib import Path

import pytest

from verifier.checkpoint.digests import begin_digest, digest_of, tokenizer_digest_of
from verifier.checkpoint.refusals import CheckpointError


def test_the_index_of_shards_counts(tmp_path: Path) -> None:
    """It says which shard's weights are used where two have the same name."""
    for name, index in (("a", "1"), ("b", "1"), ("c", "2")):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("model-1.safetensors", "model-2.safetensors", "config.json"):
            (folder / file).write_text(file)
        (folder / "model.safetensors.index.json").write_text(index)
    first, same, other = (digest_of(tmp_path / name) for name in "abc")
    assert first == same != other
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text("another")
    assert digest_of(tmp_path / "d") != first


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()  # whoever may read all files cannot read this one
    with pytest.raises(CheckpointError, match=name):
        digest_of(tmp_path)
    # Within a thread of its own; who waits for it must not wait for ever.
    with pytest.raises(CheckpointError, match=name):
        begin_digest(tmp_path).result(timeout=30)
    if name == "tokenizer.json":
        with pytest.raises(CheckpointError, match=name):
            tokenizer_digest_of(tmp_path)
