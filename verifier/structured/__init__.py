"""Output that follows a grammar: JSON schema, regular expression, choice or Lark grammar.

Owns compiling grammars, off the engine's thread, and where each sequence stands in its own. The
sampler chooses no token that a grammar forbids; drafts are cut where it forbids them, and where it
leaves one way its tokens are drafted. llguidance does the parsing. What it would not keep of a JSON
schema is refused first (`json_schema/`); what takes too long to compile ends a process of its own
(`trial_process.py`).
"""
