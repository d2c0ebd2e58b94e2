"""The sampling that a model's folder recommends, in its `generation_config.json`.

Owns which of its values count: those that vLLM and SGLang take, too, where they can be sampled
with. `do_sample` does not: these servers sample whatever it says. As a program, it prints what a
gateway makes of a folder: `python -m gateway.text.sampling_defaults FOLDER`.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.declared import declared
from tandem.values import SamplingDefaults, SamplingParams

_FILE = "generation_config.json"


class GenerationConfigError(Exception):
    """A `generation_config.json` cannot be read."""


#: Where a model has none of its own: OpenAI's.
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
    for each in declared(SamplingParams):
        value = config.get(each.name) if each.is_recommended else None
        if value is None or each.range is None:
            continue
        if each.type is int and value == -1:
            value = 0  # of `top_k`: all
        kinds = int if each.type is int else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or value not in each.range:
            on_ignored(each.name, value)
        else:
            usable[each.name] = each.type(value)
    return SamplingDefaults(**usable)


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
