"""A server process: its ports, health, signals, drain and end."""
