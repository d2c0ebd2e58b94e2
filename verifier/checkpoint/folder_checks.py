"""What a checkpoint folder must not hold, whatever reads it: pipes, devices, endless JSON."""

from pathlib import Path

from verifier.checkpoint.refusals import CheckpointError

_JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
# As of the JSON in a safetensors file. The largest tokenizers have a third of it.
_LARGEST_JSON = 100 << 20


def check_files(folder: Path) -> None:
    """Checks the kind and the size of the files that are read as a whole or mapped.

    Raises:
        CheckpointError: one is a pipe or a device, which may never end, or is too large.
    """
    try:
        for path in (*(folder / name for name in _JSON), *sorted(folder.glob("*.safetensors"))):
            if not path.exists() or path.is_dir():
                continue  # what needs it says so
            if not path.is_file():
                raise CheckpointError(f"{path}: is no regular file")
            if path.name in _JSON and path.stat().st_size > _LARGEST_JSON:
                raise CheckpointError(f"{path}: has more than {_LARGEST_JSON >> 20} MiB")
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}") from error
