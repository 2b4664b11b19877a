"""The one exception a user can cause, and how its sentences name things.

The command line prints the sentence and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """Something the user can mend. The message is one sentence naming the thing, the value and the remedy."""


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` where something known is close to the word, else what is known, as far as it is short."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {some(known, 20)}"
