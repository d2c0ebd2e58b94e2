"""Text to tokens, and tokens to text as they come.

Owns the tokenizer, the chat template, incremental detokenising, stop strings and the threads for
long texts. Knows no request and no step.
"""
