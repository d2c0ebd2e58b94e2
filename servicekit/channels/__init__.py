"""Connections to peers: channels and streams, credentials, and the replicas behind a name."""
