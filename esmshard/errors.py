"""The exceptions that a user's mistake raises. Everything else is a bug of ours.

The command line prints the message of an `InputError` as one sentence and leaves with its `exit_code`; library users
catch it as a `ValueError`. The message says what is wrong, where (file, line, record) and the mend.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Data, weights or a checkpoint that cannot be used. Exit code 1."""

    exit_code = 1
    shared = False
    """Raised on every rank alike, so that the first one alone should print it."""


class NotANumber(InputError):
    """A label that was to be a number and is none."""


class LostProcess(InputError):
    """Another process of the run is gone or stuck, so that this one cannot go on. Exit code 69.

    The same run may go well if it is started again, which launchers and job scripts see by the code (EX_UNAVAILABLE).
    """

    exit_code = 69


class UsageError(InputError):
    """A command line or a recipe that cannot be used. Exit code 2.

    A recipe may be wrong in several places; `problems` holds one sentence for each.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@contextmanager
def reading(what: str, fix: str) -> Iterator[None]:
    """Turn what goes wrong in a `with` block into one sentence, where the block reads values that a file may lack.

    It is for files that we write ourselves and somebody may have altered: not each value of theirs is checked for its
    type before it is used, so that one of another type raises whatever its use raises.

    Args:
        what: the file, for the message.
        fix: what to do about it.

    Raises:
        InputError: instead of the errors that a missing or foreign value causes.
    """
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{what}: damaged ({error} is missing in it); {fix}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, StopIteration) as error:
        raise InputError(f"{what}: damaged ({' '.join(str(error).split())}); {fix}") from error


def unwritable(error: BaseException) -> str | None:
    """Why a disk takes no more, or nothing at all, in a few words; None if the error is of another kind.

    A missing permission is of another kind: it may be one to read, and its own message has the path.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return os.strerror(number).lower()
    # numpy, zip archives, HDF5, safetensors and torch say it in words only.
    words = ("No space left", "File too large", "Disk quota exceeded", " requested and ", "iostream error")
    return "no space left on device" if any(text in str(error) for text in words) else None


@contextmanager
def writing(out: Path, fix: str = "make room, or choose another place, and run the command again") -> Iterator[None]:
    """Turn what a full or read-only disk makes of a `with` block that writes into one sentence with the path.

    Args:
        out: what is written.
        fix: what to do about it.

    Raises:
        InputError: the disk is full, or takes nothing.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if (why := unwritable(error)) is None:
            raise
        raise InputError(f"{getattr(error, 'filename', None) or out}: cannot be written ({why}); {fix}") from error
