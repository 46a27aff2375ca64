"""The exceptions that a user's mistake raises. Everything else is a bug of ours.

The command line prints the message of an `InputError` as one sentence and leaves with its `exit_code`; library users
catch it as a `ValueError`. The message says what is wrong, where (file, line, record) and the mend.
"""


class InputError(ValueError):
    """Data, weights or a checkpoint that cannot be used. Exit code 1."""

    exit_code = 1
    shared = False
    """Raised on every rank alike, so that the first one alone should print it."""
    transient = False
    """Raised because another process is gone or stuck: the same run may go well if it is started again."""


class NotANumber(InputError):
    """A label that was to be a number and is none."""


class UsageError(InputError):
    """A command line or a recipe that cannot be used. Exit code 2.

    A recipe may be wrong in several places; `problems` holds one sentence for each.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
