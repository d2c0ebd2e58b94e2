"""The verifier: runs the model and decides which drafts stand. Start reading at `engine.py`."""
