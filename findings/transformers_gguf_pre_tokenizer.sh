#!/bin/sh
# transformers 5.24.0, tokenizer of a GGUF file (`AutoTokenizer.from_pretrained(..., gguf_file=...)`).
#
# A GGUF file names the rules that split text into words in `tokenizer.ggml.pre`. transformers heeds
# the names qwen2 and llama-bpe, so the key seems to count. For other names, such as smollm, whose
# models were trained with every digit as a word of its own, it says nothing and splits as gpt-2
# does. Prompts with numbers or indented code then get other tokens than the model knows.
#
# Seen with one vocabulary that has tokens for 12, 34 and 1234, for the text "1234":
#   qwen2 1|2|3|4   llama-bpe 12|3|4   gpt-2 1234   smollm 1234 (1|2|3|4 by the model's own rules)
#
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
from transformers import AutoTokenizer

alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
tokens = [chr(code) for code in alphabet]
tokens += [chr(256 + i) for i in range(256 - len(alphabet))]
tokens += ["12", "34", "1234", "<|end|>"]
seen = {}
for pre in ("qwen2", "llama-bpe", "gpt-2", "smollm"):
    writer = gguf.GGUFWriter(f"{pre}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(["1 2", "3 4", "12 34"])
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = AutoTokenizer.from_pretrained(".", gguf_file=f"{pre}.gguf")
    seen[pre] = "|".join(tokenizer.tokenize("1234"))
    print(pre, seen[pre])
expected = {"qwen2": "1|2|3|4", "llama-bpe": "12|3|4", "gpt-2": "1234", "smollm": "1234"}
raise SystemExit(seen != expected)
PYTHON
"$folder/venv/bin/python" probe.py
