"""The options of a run apart from its recipe: those of `esmshard finetune`, in the shell and in Python."""

from dataclasses import dataclass

from esmshard.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one call. They travel as one object from the command line or Python to the run.

    Raises:
        UsageError: if two options contradict each other.
    """

    nproc: int | None = None
    """Local processes; None means one for each GPU, or one. A single process is this process."""
    resume: str | None = None
    """`auto` continues from the newest checkpoint of the run, a path from that run or checkpoint. None starts a new
    run.
    """
    overwrite: bool = False
    """Replace the files of an earlier run."""
    dry_run: bool = False
    """Check everything, print the planned run, and stop."""
    profile: int = 0
    """The number of steps to record with torch's profiler."""
    stop_after: str | None = None
    """Save and end with exit code 75 after this time, such as `3h50m`."""
    max_restarts: int = 0
    """How often all local processes are started again after the loss of a process."""
    seeds: int = 1
    """The number of runs with different seeds."""
    folds: int | None = None
    """The number of folds of a cross-validation; None means 5 for a table of variants, else no cross-validation."""
    report: bool = True
    """Draw figures and report.html at the end."""
    trust: bool = False
    """Read a checkpoint that another user wrote."""
    started: float | None = None
    """The time at which the command began, in seconds since 1970; None means now."""

    def __post_init__(self) -> None:
        if self.resume == "never":
            object.__setattr__(self, "resume", None)
        if self.resume and self.overwrite:
            raise UsageError("--resume goes on with a run, --overwrite removes it; give one of them")
        if self.max_restarts and self.resume not in (None, "auto"):
            raise UsageError("--max-restarts goes on from the newest checkpoint of the run: give --resume auto with it")

    @property
    def of_a_single_command(self) -> bool:
        """Whether an option is set that only the command that starts all processes of a run can carry out."""
        return bool(self.nproc or self.dry_run or self.max_restarts or self.seeds > 1 or self.folds)

    def flags(self, *, report: bool) -> list[str]:
        """Return the command line options for each process of a run."""
        flags = ["--resume", self.resume] if self.resume else []
        flags += ["--overwrite"] if self.overwrite else []
        flags += ["--profile", str(self.profile)] if self.profile else []
        flags += ["--trust"] if self.trust else []
        return flags if report else [*flags, "--no-report"]
