"""Text to tokens, and tokens to text as they come.

Owns the tokenizers, the chat templates, incremental detokenising, stop strings, tool calls and the
threads for long texts. Knows no request and no step.
"""
