"""A job as a script for `sbatch`: srun starts one task for each process, without another launcher.

The script asks Slurm to requeue the job if the processes were asked to stop, and starts the step again if a process was
lost. It decides by srun's exit code, which is the highest of all tasks. Facts about Slurm below are from its manual and
were observed on Slurm 22.05.
"""

import re
from pathlib import PurePosixPath

from esmshard.cluster.scripts.scheduler_job import SchedulerJob
from esmshard.cluster.scripts.site import OF_THE_JOB, Site, directive
from esmshard.errors import UsageError


def render(job: SchedulerJob, site: Site) -> str:
    """Return the script that `sbatch` reads and bash runs on the first node.

    Raises:
        UsageError: if a value cannot be expressed for Slurm or the container runtime.
    """
    name = file_name(job.name)
    pieces = [
        "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in _directives(job, site, name)),
        _settings(job, site),
    ]
    command = _command(job, site)
    if job.kind == "doctor":
        pieces.append(_wrapped(command, 0) + "\n")
    else:
        pieces.append(_RUN.format(command=_wrapped(command, 1), job=_job_number(job), starts=job.max_restarts + 1))
    script = "\n".join(pieces)
    if "\0" in script:
        raise UsageError("a NUL character cannot be given to a command; remove it")
    return script


def file_name(name: str) -> str:
    """Convert a text to a name for Slurm and for files.

    >>> file_name("my run; $(reboot)")
    'my-run-reboot'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "esmshard"


def quote(text: str) -> str:
    r"""Quote any text as one word of bash.

    >>> print(quote("$(reboot) 'x'"))
    "\$(reboot) 'x'"
    """
    if re.fullmatch(r"[\w@%+=:./-]+", text, re.ASCII):
        return text
    # Double quotes are used where characters need protection, because shellcheck warns of a $ in single quotes.
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"' if re.search(r"['$`]", text) else f"'{text}'"


def _directives(job: SchedulerJob, site: Site, name: str) -> list[str]:
    slurm, array = site.slurm, _is_array(job)
    options: list[tuple[str, str | int | None]] = [
        ("job-name", name),
        ("array", f"0-{job.array - 1}" if array else None),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("time", slurm.time),
        ("nodes", job.nodes),
        ("ntasks-per-node", _tasks(job)),
        _gpus(job.gpus_per_node, site),
        ("cpus-per-task", _cores(job, site)),
        ("mem", _share(slurm.memory, job, site)),
        ("output", f"{name}-{'%A_%a' if array else '%j'}.out"),
        ("open-mode", "append"),
    ]
    lines = [f"--{option}={directive(str(value))}" for option, value in options if value is not None]
    if job.kind != "doctor":
        # Only the script gets this signal, so it knows that the tasks were asked to stop. Slurm may send it up to 60 s
        # earlier.
        lines += [f"--signal=B:USR1@{slurm.grace}", "--requeue"]
    return [*lines, *slurm.options]


def _tasks(job: SchedulerJob) -> int:
    """Return the tasks of srun on each node."""
    return 1 if job.starts_processes else job.nproc


def _cores(job: SchedulerJob, site: Site) -> int | None:
    """Return the CPU cores of each task; None for Slurm's default."""
    if not job.gpus_per_node:
        return job.nproc if job.starts_processes else None
    cores = site.slurm.cpus_per_gpu
    return None if cores is None else max(1, cores * job.gpus_per_node // _tasks(job))


def _is_array(job: SchedulerJob) -> bool:
    return job.kind == "embed" or job.first_seed is not None or job.array > 1


def _gpus(count: int, site: Site) -> tuple[str, str | None]:
    """Return the site's option for requesting GPUs, and its value."""
    slurm = site.slurm
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    gpu = "gpu:" if slurm.gpu_option == "gres" else ""
    return slurm.gpu_option, f"{gpu}{kind}{count}" if count else None


def _share(memory: str | None, job: SchedulerJob, site: Site) -> str | None:
    """Return the memory of a job on each node: all of it for a run; for a worker of `embed` the share of its GPUs."""
    most = site.gpus_per_node or 0
    if memory is None or job.kind != "embed" or not 0 < job.gpus_per_node < most:
        return memory
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)", memory).groups()  # type: ignore[union-attr]
    megabytes = int(number) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[unit]
    return f"{int(megabytes * job.gpus_per_node / most)}M"


def _settings(job: SchedulerJob, site: Site) -> str:
    """Return the lines for working directory, site setup and variables."""
    lines = [] if job.kind == "doctor" else [_AGAIN[job.kind]]
    lines += ["set -e", f"cd -- {quote(job.directory)}"]
    if job.first_seed is not None:
        lines.append(f"seed=$(({job.first_seed} + SLURM_ARRAY_TASK_ID))  # each task of the array is a run of its own")
    contained = site.container.runtime != "none"
    if job.kind != "doctor" and contained:
        lines.append(f"mkdir -p -- {quote(_parent(job.out))}  # a container can only mount what is there")
    if site.slurm.modules:
        lines += [_MODULES]
    lines += [*site.slurm.setup, *(f"module load {quote(module)}" for module in site.slurm.modules)]
    lines += [f"export {name}={quote(value)}" for name, value in site.exports.items()]
    if "OMP_NUM_THREADS" not in site.exports:
        lines.append(f"export OMP_NUM_THREADS={_threads(job, site)}  # the cores of a process")
    if contained:
        lines.append("export PYTHONNOUSERSITE=1  # the packages of the image, not those of the home directory")
    if site.scratch is not None:
        lines.append(_SCRATCH.format(scratch=_expanded(site.scratch)))
    elif site.container.runtime == "pyxis":
        lines.append("export ESMSHARD_CACHE=/tmp/esmshard-$UID  # the image itself may be read-only")
    return "\n".join(lines) + "\n"


_AGAIN = {
    "finetune": "# Submit this file with `sbatch` as often as you like: the run goes on from its newest checkpoint.",
    "embed": "# Submit this file with `sbatch` as often as you like: what is finished is not computed again.",
}

_MODULES = """\
# shellcheck source=/dev/null
type module >/dev/null 2>&1 || source /etc/profile || :  # a batch shell need not know `module`"""

_SCRATCH = """\
# Caches and temporary files lie in the scratch of each node. The step makes them there, or Slurm sets TMPDIR to /tmp.
scratch={scratch}/esmshard-$UID
srun --mpi=none --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 mkdir -pm 700 -- "$scratch"/{{,cache,tmp}}
export ESMSHARD_CACHE=$scratch/cache TMPDIR=$scratch/tmp"""


def _threads(job: SchedulerJob, site: Site) -> str:
    """Return a bash expression: the cores of a node, or of a task if the job sets them, divided by its processes."""
    cores, processes = "SLURM_CPUS_ON_NODE", job.nproc
    if _cores(job, site) is not None:
        cores, processes = "SLURM_CPUS_PER_TASK", job.nproc // _tasks(job)
    if processes == 1:
        return f"${cores}"
    return f"$(({cores} > {processes} ? {cores} / {processes} : 1))"


def _command(job: SchedulerJob, site: Site) -> list[str]:
    """Return the step: srun and the command of each of its tasks."""
    step = ["srun", "--mpi=none", "--cpu-bind=none"]
    if _cores(job, site) is not None:  # from version 22.05 on, srun does not take it from sbatch
        step.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    # Workers that embed end hours apart, whatever the WaitTime of the site is. A doctor's finding on one node is an
    # exit code, too, and the other nodes must continue.
    step += [f"--kill-on-bad-exit={int(job.kind != 'doctor')}", "--wait=0"]
    step += _container(job, site)
    step += ["esmshard"] if site.container.runtime != "none" else [quote(_python(site)), "-m", "esmshard"]
    step += [quote(argument) for argument in job.arguments]
    if job.first_seed is not None:
        step += ['train.seed="$seed"', f'out={quote(job.out)}/seed-"$seed"']
    if job.nodes * _tasks(job) == 1:  # one command without ranks
        step += ["--nproc", str(job.nproc)]
    return step


def _container(job: SchedulerJob, site: Site) -> list[str]:
    """Return the options of srun, or a command before the command, that run it in a container."""
    container = site.container
    if container.runtime == "none":
        return []
    if not container.image:
        raise UsageError(f"container.runtime is {container.runtime}; set container.image in the site profile, too")
    mounts = _mounts(job, site)
    scratch = f"{_expanded(site.scratch)}:{_expanded(site.scratch)}" if site.scratch is not None else ""
    if container.runtime == "apptainer":
        words = ["apptainer", "exec", *(["--nv"] if job.gpus_per_node else [])]
        words += [f"--bind={mount}" for mount in (*map(quote, mounts), *filter(None, [scratch]))]
        return [*words, f"--pwd={quote(job.directory)}", quote(container.image)]
    listed = ",".join(mounts) + ("," if mounts and scratch else "")
    words = [f"--container-image={quote(container.image)}", f"--container-mounts={quote(listed)}{scratch}"]
    words += [f"--container-workdir={quote(job.directory)}", "--no-container-mount-home"]
    # Variables of the image override those of the job, unless they are named here.
    ours = ["OMP_NUM_THREADS", "ESMSHARD_CACHE", *(["TMPDIR"] if scratch else [])]
    words.append(f"--container-env={','.join(dict.fromkeys([*site.exports, *ours]))}")
    return words


def _mounts(job: SchedulerJob, site: Site) -> list[str]:
    """Return SRC:DST of each mount: those of the profile, and then all other paths that the run reads and writes."""
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in site.container.mounts]
    seen = [PurePosixPath(mount.split(":")[0]) for mount in mounts if mount.split(":")[0] == mount.split(":")[1]]
    # The directory of a file is mounted, since labels and coordinates lie beside the data.
    own = [job.directory, *(path if _parent(path) == "/" else _parent(path) for path in job.reads)]
    if job.kind != "doctor":
        own.append(_parent(job.out))
    for place in sorted(set(own), key=lambda path: (path.count("/"), path)):
        # Neither runtime can quote separators in its list of mounts, and enroot's tables of mounts are split at blanks.
        if re.search(r"[:,\n]" if site.container.runtime == "apptainer" else r"[:,\s]", place):
            raise UsageError(
                f"{place}: a container cannot mount a path with ':', ',' or a line break (nor, with pyxis, a blank); "
                "rename it"
            )
        if place == "/" or any(PurePosixPath(place).is_relative_to(one) for one in seen):
            continue
        seen.append(PurePosixPath(place))
        mounts.append(f"{place}:{place}")
    return mounts


def _expanded(text: str) -> str:
    """Quote a word of bash in which only variables of Slurm expand."""
    parts = re.split(rf"(\$\{{{OF_THE_JOB}\}})", text)
    return "".join(f'"{part}"' if n % 2 else quote(part) for n, part in enumerate(parts) if part)


def _parent(out: str) -> str:
    return str(PurePosixPath(out).parent)


def _python(site: Site) -> str:
    if site.python is None:
        raise UsageError("python: the job needs an interpreter; set it in the site profile")
    return site.python


def _wrapped(words: list[str], depth: int) -> str:
    """Format a command over several indented lines. A word may contain line breaks of its own."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > 100:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "    " * depth + (" \\\n" + "    " * (depth + 1)).join(lines)


def _job_number(job: SchedulerJob) -> str:
    # The number alone may mean the whole array; the number of one of its tasks may be that of the array.
    return "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if _is_array(job) else "$SLURM_JOB_ID"


_RUN = """\
# Slurm sends USR1 to this shell before the time limit. srun passes it on to the tasks; at a TERM it would end them.
asked='' code=75 starts=0
trap 'asked=yes interrupted=yes; kill -USR1 "$srun" 2>/dev/null || :' TERM USR1
while [[ ! $asked ]]; do
{command} &
    srun=$! interrupted=yes
    while [[ $interrupted ]]; do # a signal interrupts `wait`
        interrupted=''
        wait "$srun" && code=0 || code=$?
    done
    case $code in
        75 | 138) break ;; # asked to stop, and saved
        69 | 70 | 134 | 135 | 137 | 139 | 143) # a process was lost, and srun ended the others
            ((++starts < {starts})) || exit "$code"
            echo "esmshard: a process was lost (exit code $code)" >&2 ;;
        *) exit "$code" ;; # done, or a mistake that would only come again
    esac
done

# Back into the queue. Not where Slurm itself ends the job: this would bring one that was cancelled back to life.
job={job}
if scontrol show job "$job" | grep -q JobState=RUNNING; then
    scontrol requeue "$job" || echo "esmshard: job $job is not requeued; sbatch this file again, it goes on" >&2
fi
exit 75
"""
