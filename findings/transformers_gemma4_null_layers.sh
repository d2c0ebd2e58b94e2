#!/bin/sh
# transformers 5.24.0, the configuration of Gemma 4's text.
#
# Full-attention layers have wider heads than sliding ones: 512 instead of 256, unless the file's
# `global_head_dim` says otherwise. That holds only while the key `per_layer_config` is absent. A
# `config.json` in which it is `null`, as for other optional keys, or an empty object, is accepted
# without a word, `global_head_dim` is ignored, and all layers get heads of 256. For other optional
# keys of the same class, `null` and absence mean the same (`layer_types`, `rope_parameters`).
#
# Seen: "absent: 512", "null: 256", "empty: 256"; with `layer_types` and `rope_parameters` null, 512.
# Fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
cd "$folder"
cat > probe.py <<'PYTHON'
import json
import pathlib

from transformers import AutoConfig

FILE = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size": 512,
}


def head_size_of_the_full_layer(**keys: object) -> int:
    """As told for the last layer, which is a full one, of a config.json with these keys."""
    pathlib.Path("config.json").write_text(json.dumps({**FILE, **keys}))
    told = AutoConfig.from_pretrained(".").to_dict()
    of_layers = {int(layer): own for layer, own in (told.get("per_layer_config") or {}).items()}
    return of_layers.get(5, {}).get("head_dim", told["head_dim"])


print("absent:", head_size_of_the_full_layer())
print("null:", head_size_of_the_full_layer(per_layer_config=None))
print("empty:", head_size_of_the_full_layer(per_layer_config={}))
print("others null:", head_size_of_the_full_layer(layer_types=None, rope_parameters=None))
PYTHON
"$folder/venv/bin/python" probe.py 2>/dev/null > seen
cat seen
cat > expected <<'TEXT'
absent: 512
null: 256
empty: 256
others null: 512
TEXT
diff expected seen
