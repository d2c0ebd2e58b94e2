"""`/v1/responses`: OpenAI's newer form of a conversation, without its store.

A request becomes one for a chat completion (`conversion.py`) and runs as that; its answer is
written as items and events (`answer.py`).
"""
