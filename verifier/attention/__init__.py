"""Attention over a paged K/V cache: one small interface, one module per backend."""
