"""Output that follows a grammar: JSON schema, regular expression, choice or Lark grammar.

Owns compiling grammars, off the engine's thread, and where each sequence stands in its own. The
sampler chooses no token that a grammar forbids; drafts are cut where it forbids them, and where it
leaves one way its tokens are drafted. llguidance does the parsing.
"""
