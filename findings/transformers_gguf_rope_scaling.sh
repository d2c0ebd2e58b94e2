#!/bin/sh
# transformers 5.24.0, configuration of a GGUF file (`AutoConfig.from_pretrained(..., gguf_file=...)`).
#
# A GGUF file tells scaled positions by `rope.scaling.type`, `rope.scaling.factor` and, for yarn,
# `rope.scaling.original_context_length`. transformers reads the base (`rope.freq_base`) and the
# longer context that only the scaling makes possible (`context_length`), drops the scaling without a
# word, and computes unscaled positions: of Gemma 3 from 4B on (linear, 8) every full layer is wrong
# from the first token on.
#
# Seen for files of three architectures with a factor of 8: rope_type is "default", no factor.
# Fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 tokenizers==0.23.3 \
  torch==2.13.0
cd "$folder"
cat > probe.py <<'PYTHON'
import gguf
from transformers import AutoConfig

seen = {}
for architecture, kind in (("llama", "linear"), ("qwen2", "yarn"), ("gemma3", "linear")):
    writer = gguf.GGUFWriter(f"{architecture}.gguf", architecture)
    writer.add_block_count(2)
    writer.add_context_length(131072)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(16384)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0])
    writer.add_token_types([2, 3, 3, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = AutoConfig.from_pretrained(".", gguf_file=f"{architecture}.gguf")
    ropes = config.rope_parameters
    ropes = [ropes] if "rope_type" in ropes else list(ropes.values())
    seen[architecture] = config.max_position_embeddings, [
        (rope["rope_type"], rope.get("factor")) for rope in ropes
    ]
print(seen)
unscaled = ("default", None)
assert seen == {
    "llama": (131072, [unscaled]),
    "qwen2": (131072, [unscaled]),
    "gemma3": (131072, [unscaled, unscaled]),
}, seen
PYTHON
./venv/bin/python probe.py
