"""Why a checkpoint folder does not become a decoder."""


class CheckpointError(Exception):
    """The folder holds no checkpoint that can be served, for the reason in the message."""


class NotServedError(Exception):
    """The decoder of this room does not compute this model, for the reason in the message.

    transformers may still serve it.
    """
