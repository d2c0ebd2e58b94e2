"""Sends invalid inputs to every method of every service, and checks that nothing breaks.

`messages.py` makes inputs from the methods' descriptors, `services.py` runs the services and reads
their logs, `calls.py` makes calls and checks how they end, `answers.py` checks responses against
the contract, `campaign.py` runs calls beside a client whose output must not change.
"""
