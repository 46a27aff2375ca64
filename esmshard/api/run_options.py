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
    """The local processes; None means one for each GPU, or one. A single process is this process."""
    device: str | None = None
    """The device of every process: `cpu`, `cuda`, `cuda:N` or `mps`; None means its own GPU if there is one. Of several
    processes with `cuda` each has its own GPU.
    """
    resume: str | None = None
    """The state to continue from: `auto` is the newest checkpoint of this run; a path is a run or a checkpoint. None
    starts a new run.
    """
    overwrite: bool = False
    """Whether the files of an earlier run are replaced."""
    dry_run: bool = False
    """Whether the command only checks everything and prints the planned run."""
    profile: int = 0
    """The number of steps to record with torch's profiler."""
    stop_after: str | None = None
    """The time after which the run saves and ends with exit code 75, such as `3h50m`."""
    max_restarts: int = 0
    """How often all local processes are started again after the loss of a process."""
    seeds: int | None = None
    """The number of runs with different seeds; None means 1, and 3 for the best settings of a sweep."""
    folds: int | None = None
    """The number of folds of a cross-validation; None means 5 for a table of variants, else no cross-validation."""
    sweep: str | None = None
    """The file of a search over settings of the recipe."""
    trials: int | None = None
    """The number of trials of a sweep; None means 20, or the whole grid."""
    report: bool = True
    """Whether figures and report.html are drawn at the end."""
    take_over: bool = False
    """Whether the lock of a run on another machine is taken, which cannot be seen to have ended."""
    env: tuple[str, ...] = ()
    """The environment variables that the recipe may read besides the harmless ones (`recipe_file.may_read`)."""
    started: float | None = None
    """The time at which the command began, in seconds since 1970; None means now."""

    def __post_init__(self) -> None:
        if self.resume == "never":
            object.__setattr__(self, "resume", None)
        if self.resume and self.overwrite:
            raise UsageError("--resume continues a run, and --overwrite removes it; pass one of the two")
        if self.max_restarts and self.resume not in (None, "auto"):
            raise UsageError("--max-restarts continues from the newest checkpoint of the run; pass --resume auto, too")
        if self.trials is not None and self.sweep is None:
            raise UsageError("--trials is the number of trials of a sweep; pass --sweep FILE, too, or leave it out")
        if self.sweep is not None and self.overwrite:
            raise UsageError(
                "--sweep does not go with --overwrite; remove the directory, or choose another with out=DIR"
            )
        if self.sweep is not None and (self.folds or self.profile or self.resume not in (None, "auto")):
            raise UsageError(
                "--sweep does not go with --folds, whose test sets trials would train on, with --profile, and with the "
                "path of a run; leave them out, and continue with --resume auto"
            )

    @property
    def several_seeds(self) -> bool:
        """Whether there are several runs with different seeds."""
        return self.seeds is not None and self.seeds > 1

    @property
    def of_a_single_command(self) -> bool:
        """Whether an option is set that only the command that starts all processes of a run can carry out."""
        return bool(self.nproc or self.dry_run or self.max_restarts or self.several_seeds or self.folds)

    def flags(self, *, report: bool) -> list[str]:
        """Return the command line options for each process of a run."""
        flags = ["--device", self.device] if self.device else []
        flags += ["--resume", self.resume] if self.resume else []
        flags += ["--overwrite"] if self.overwrite else []
        flags += ["--profile", str(self.profile)] if self.profile else []
        flags += ["--take-over"] if self.take_over else []
        return flags if report else [*flags, "--no-report"]
