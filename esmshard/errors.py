"""The exceptions for mistakes of a user. Any other exception is a bug.

The command line prints the message of an `InputError` as one sentence and returns its `exit_code`; Python users catch
it as a `ValueError`. The message says what is wrong, where (file, line, record), and how to fix it.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """The exit codes of the commands. A signal N that ends a process without saving gives 128 + N."""

    DONE = 0
    FAILED = 1
    """Data, weights or a checkpoint cannot be used, or a run has failed."""
    USAGE = 2
    """The command line or the recipe is wrong. Nothing was begun."""
    RUNNING = 3
    """`esmshard status`: a run has not ended."""
    LOST = 69
    """Another process has ended or is stuck (EX_UNAVAILABLE). The run may succeed if it is started again."""
    CRASHED = 70
    """A traceback (EX_SOFTWARE): an error of esmshard or of a library, not a mistake of the user. The run may succeed
    if it is started again.
    """
    REQUEUE = 75
    """The run was asked to stop, has saved, and can continue (EX_TEMPFAIL)."""
    INTERRUPTED = 130
    """Ctrl-C."""


class InputError(ValueError):
    """Data, weights or a checkpoint cannot be used."""

    exit_code: int = ExitCode.FAILED
    shared = False
    """Whether every rank raises the same error, so that only the first rank prints it."""


class LostProcess(InputError):
    """Another process of the run has ended or is stuck, so this process cannot go on."""

    exit_code = ExitCode.LOST


class UsageError(InputError):
    """A command line or a recipe cannot be used.

    A recipe may be wrong in several places; `problems` has one sentence for each.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunFailed(RuntimeError):
    """The processes of a run ended before the run was done. They have printed the reason to stderr."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code of the process whose failure was the cause."""


@contextmanager
def reading(what: str, fix: str) -> Iterator[None]:
    """Turn errors of a `with` block that reads values of the file `what` into one `InputError` with a `fix`.

    This is for files that esmshard writes and that somebody may have changed. Nothing checks their values before the
    use, so a wrong value raises the error of the operation that uses it.
    """
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{what}: damaged ({error} is missing in it); {fix}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, StopIteration) as error:
        raise InputError(f"{what}: damaged ({' '.join(str(error).split())}); {fix}") from error


_NO_ROOM = ("No space left", "File too large", "Disk quota exceeded", " requested and ", "iostream error")
"""Texts in errors of numpy, zip archives, HDF5, safetensors and torch. These errors have no error number."""


@contextmanager
def writing(out: Path, fix: str = "make room, or choose another place, and run the command again") -> Iterator[None]:
    """Turn the error of a `with` block that writes `out` to a full or read-only disk into one `InputError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        # A missing permission is another error: it may be a permission to read, and its message has the path.
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            reason = os.strerror(number).lower()
        elif any(text in str(error) for text in _NO_ROOM):
            reason = "no space left on device"
        else:
            raise
        raise InputError(f"{getattr(error, 'filename', None) or out}: cannot be written ({reason}); {fix}") from error
