"""How calls reach a server: channels that follow certificates, and what follows a failure."""
