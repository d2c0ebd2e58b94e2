"""Sends every method of every service what no client should send, and looks whether anybody minds.

`messages.py` makes inputs from the methods' descriptors, `services.py` runs the services and knows
what they should not have done, `calls.py` makes calls and judges their answers, `bystander.py` is
the client that must not notice anything, `campaign.py` puts them together.
"""
