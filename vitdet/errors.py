"""The one exception a user can cause: the command line prints its sentence and exits with 2."""


class UserError(ValueError):
    """Something the user can mend. The message is one sentence naming the thing, the value and the remedy."""
