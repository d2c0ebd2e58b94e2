"""GGUF files: what they hold, and as the folder of documents that stands for one.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
