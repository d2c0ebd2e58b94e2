"""Tandem serves language models faster by n-gram speculative decoding.

This package is what a client imports: `tandem.client`, the command line in `tandem.cli`, and the
stubs of the wire contract in `tandem.v1`. It does not know the services. It imports nothing here,
because the services import `tandem.v1` through it.
"""
