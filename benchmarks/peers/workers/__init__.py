"""Processes of the systems compared, each answering `benchmarks.peers.protocol`."""
