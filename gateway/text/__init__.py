"""Text to tokens, and tokens to text as they come.

Owns the tokenizers, the chat templates, incremental detokenising, the threads for long texts and,
in `output/`, stop strings, reasoning and tool calls. Knows no request and no step.
"""
