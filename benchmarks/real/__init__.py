"""A real model through the real services, beside other servers of the same GGUF file."""
