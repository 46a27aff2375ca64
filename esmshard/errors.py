"""The exceptions for mistakes of a user. Any other exception is a bug.

A message says what is wrong, where (file, line, record), and how to fix the mistake. For an `InputError` the command
line prints the message and ends with the exit code of the error. Python users can catch a `ValueError`.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of the commands. If signal N ends a process that has not saved its work, the code is 128 + N."""

    DONE = 0
    FAILED = 1
    """Data, weights or a checkpoint cannot be used, or a run has failed."""
    USAGE = 2
    """The command line or the recipe is wrong. The command has not started its work."""
    RUNNING = 3
    """The code of `esmshard status` for a run that has not ended."""
    LOST = 69
    """Another process of the run has ended or is stuck (EX_UNAVAILABLE). The run may succeed if it is started again."""
    CRASHED = 70
    """esmshard or a library has failed, without a mistake of the user (EX_SOFTWARE). The command prints a traceback."""
    REQUEUE = 75
    """The run was asked to stop, has saved its work, and can continue (EX_TEMPFAIL)."""
    INTERRUPTED = 130
    """The user has stopped the command with Ctrl-C."""


class InputError(ValueError):
    """The error for data, weights or a checkpoint that cannot be used."""

    exit_code: int = ExitCode.FAILED
    shared = False
    """Whether every rank raises the same error. If so, only the first rank prints the message."""


class LostProcess(InputError):
    """The error for a process that must stop because another process of the run has ended or is stuck."""

    exit_code = ExitCode.LOST


class UsageError(InputError):
    """The error for a command line or a recipe that cannot be used.

    The attribute `problems` has one sentence for each mistake.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RunFailed(RuntimeError):
    """The error for a run whose processes ended before the run was done. The processes print the reason to stderr."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code of the process whose failure ended the run."""


@contextmanager
def reading(what: str, fix: str) -> Iterator[None]:
    """Raise an `InputError` in place of another error, such as KeyError, that a damaged file causes in a `with` block.

    Use this function for files that esmshard writes, whose values nothing else checks. `what` names the file and begins
    the message. `fix` says what the user must do and ends the message.
    """
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{what}: damaged ({error} is missing); {fix}") from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, StopIteration) as error:
        raise InputError(f"{what}: damaged ({' '.join(str(error).split())}); {fix}") from error


_NO_ROOM = ("No space left", "File too large", "Disk quota exceeded", " requested and ", "iostream error")
"""Texts in errors about a full disk from libraries that give no error number (numpy, HDF5, safetensors, torch)."""


@contextmanager
def writing(out: Path, fix: str = "make room, or choose another place, and run the command again") -> Iterator[None]:
    """Raise an `InputError` when a `with` block cannot write `out` because a disk is full or read-only."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        # An error about permissions stays as it is, because it may concern an input file. Its message has the path.
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            reason = os.strerror(number).lower()
        elif any(text in str(error) for text in _NO_ROOM):
            reason = "no space left on device"
        else:
            raise
        raise InputError(f"{getattr(error, 'filename', None) or out}: cannot be written ({reason}); {fix}") from error
