"""The sampling that a model's folder recommends, in its `generation_config.json`.

Owns which of its values count: those that vLLM and SGLang take, too, where they can be sampled
with. `do_sample` does not: these servers sample whatever it says. As a program, it prints what a
gateway makes of a folder: `python -m gateway.text.sampling_defaults FOLDER`.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_FILE = "generation_config.json"

# The least and the most of each; as of a request.
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, sys.float_info.max),
    "top_p": (sys.float_info.min, 1.0),
    "top_k": (-1, 2**32 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
}


class GenerationConfigError(Exception):
    """A `generation_config.json` cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What requests over HTTP get that name no value; those of OpenAI without a model's own.

    Attributes:
        top_k: 0: tokens are sampled from all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


#: Where a model has none of its own.
NO_DEFAULTS = SamplingDefaults()


def load(folder: Path, *, on_ignored: Callable[[str, Any], None]) -> SamplingDefaults:
    """Those of a model's folder.

    Args:
        on_ignored: called with the name and the value of each that no request could have.

    Raises:
        GenerationConfigError: its file is no JSON object.
    """
    path = folder / _FILE
    if not path.is_file():
        return NO_DEFAULTS
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise GenerationConfigError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise GenerationConfigError(f"{path}: is not an object")
    usable: dict[str, Any] = {}
    for name in _RANGES:
        value = config.get(name)
        if value is None:
            continue
        if not _is_usable(name, value):
            on_ignored(name, value)
        else:
            usable[name] = max(value, 0) if name == "top_k" else float(value)
    return SamplingDefaults(**usable)


def _is_usable(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
        return False
    least, most = _RANGES[name]
    return least <= value <= most


def main() -> None:
    """Prints one JSON object: `defaults`, `ignored` and, if the file cannot be read, `error`."""
    ignored: dict[str, str] = {}
    try:
        defaults = load(Path(sys.argv[1]), on_ignored=ignored.__setitem__)
    except GenerationConfigError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"defaults": dataclasses.asdict(defaults), "ignored": ignored}))


if __name__ == "__main__":
    main()
