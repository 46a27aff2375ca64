"""A job as a script for `sbatch`.

One launcher of ours runs on each node, under srun. The script asks Slurm to start the job again where the run says that
it was preempted, and nowhere else. Facts about Slurm below are of its manual and were seen on Slurm 22.05.
"""

import re
from pathlib import PurePosixPath

from esmshard.cluster.job import Job
from esmshard.cluster.site import OF_THE_JOB, Site, directive
from esmshard.errors import UsageError

PORTS = 2000
"""Jobs that share a node meet at as many different ports, by job id. From 32,768 on the kernel gives them to others."""

IDLE = 3
"""Starts without a new step after which the job is not started again."""

# Exit codes after which a start may be followed by another: saved; ended by SIGUSR1 or SIGTERM before it could save.
_PREEMPTED = "75 | 138 | 143"


def render(job: Job, site: Site) -> str:
    """The script: what `sbatch` reads, and bash runs on the first node.

    Raises:
        UsageError: something cannot be said in the words of Slurm or of the container runtime.
    """
    name = file_name(job.name)
    if job.kind == "finetune":
        progress = _STATUS
    elif job.kind == "embed":
        progress = _PARTS
    else:
        progress = ""
    pieces = [
        "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in _directives(job, site, name)),
        _BEGIN + (_SAY if progress else ""),
        _settings(job, site),
        _meeting(job, site),
        _command(job, site),
        progress,
        _WAIT + (_DECIDE if progress else _DOCTOR),
    ]
    script = "\n".join(piece for piece in pieces if piece)
    if "\0" in script:
        raise UsageError("a NUL character cannot be given to a command; remove it")
    return script


def file_name(name: str) -> str:
    """A name as Slurm and files take it.

    >>> file_name("my run; $(reboot)")
    'my-run-reboot'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "esmshard"


def quote(text: str) -> str:
    r"""A word of bash that is `text`, whatever is in it.

    >>> print(quote("$(reboot) 'x'"))
    "\$(reboot) 'x'"
    """
    if re.fullmatch(r"[\w@%+=:./-]+", text, re.ASCII):
        return text
    # Double quotes where there is something to protect: in single ones shellcheck takes a $ for a mistake.
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"' if re.search(r"['$`]", text) else f"'{text}'"


def _directives(job: Job, site: Site, name: str) -> list[str]:
    slurm, array = site.slurm, _is_array(job)
    elastic = job.min_nodes < job.nodes
    cores = slurm.cpus_per_gpu and slurm.cpus_per_gpu * job.gpus_per_node
    if not job.gpus_per_node:
        cores = job.nproc
    options: list[tuple[str, str | int | None]] = [
        ("job-name", name),
        ("array", f"0-{job.array - 1}" if array else None),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("time", slurm.time),
        ("nodes", f"{job.min_nodes}-{job.nodes}" if elastic else job.nodes),
        ("ntasks-per-node", 1),
        _gpus(job.gpus_per_node, site),
        ("cpus-per-task", cores or None),
        ("mem", _share(slurm.memory, job, site)),
        ("output", f"{name}-{'%A_%a' if array else '%j'}.out"),
        ("open-mode", "append"),
    ]
    lines = [f"--{option}={directive(str(value))}" for option, value in options if value is not None]
    if job.kind != "doctor":
        # To all processes of the steps, not to this script; Slurm may send it up to 60 s earlier.
        lines += [f"--signal=USR1@{slurm.grace}", "--requeue"]
    if elastic:
        lines.append("--no-kill")  # else the loss of a node ends the job
    return [*lines, *slurm.options]


def _is_array(job: Job) -> bool:
    return job.kind == "embed" or job.first_seed is not None


def _gpus(count: int, site: Site) -> tuple[str, str | None]:
    """The option by which the site wants GPUs to be asked for, and its value."""
    slurm = site.slurm
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    gpu = "gpu:" if slurm.gpu_option == "gres" else ""
    return slurm.gpu_option, f"{gpu}{kind}{count}" if count else None


def _share(memory: str | None, job: Job, site: Site) -> str | None:
    """Memory of a job on each node: all of it for a run, and for a worker of `embed` as much as for its GPUs."""
    most = site.gpus_per_node or 0
    if memory is None or job.kind != "embed" or not 0 < job.gpus_per_node < most:
        return memory
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)", memory).groups()  # type: ignore[union-attr]
    megabytes = int(number) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[unit]
    return f"{int(megabytes * job.gpus_per_node / most)}M"


_BEGIN = """\
# Submit it with `sbatch` as often as you like: it goes on where the last one stopped.
set -euo pipefail
"""

_SAY = """
say() { printf 'esmshard: %s\\n' "$*" >&2; }
"""


def _settings(job: Job, site: Site) -> str:
    """Working directory, what the site sets up, variables."""
    lines = [f"cd -- {quote(job.directory)}"]
    if job.first_seed is not None:
        lines += [
            f"seed=$(({job.first_seed} + SLURM_ARRAY_TASK_ID))  # each task of the array is a run of its own",
            f"out={quote(job.out)}/seed-$seed",
        ]
    elif job.kind != "doctor":
        lines += [f"out={quote(job.out)}"]
    if job.kind != "doctor" and site.container.runtime != "none":  # what is not there cannot be mounted
        lines += [f"mkdir -p -- {quote(_parent(job.out))}"]
    if site.slurm.modules or site.slurm.setup:
        loads = [f"module load {quote(module)}" for module in site.slurm.modules]
        lines += [_MODULES, *site.slurm.setup, *loads, "set -u"]
    lines += [f"export {name}={quote(value)}" for name, value in site.exports.items()]
    if _is_array(job):
        # The number alone may mean the whole array: that of one of its tasks is the array's own.
        lines += ["job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"]
    else:
        lines += ["job=$SLURM_JOB_ID"]
    if "ESMSHARD_JOB_ID" not in site.exports:
        lines += ["export ESMSHARD_JOB_ID=$job  # the same when the job is started again"]
    if "OMP_NUM_THREADS" not in site.exports:
        lines += [
            "# Python sees the cores of the machine, and not those of the job.",
            f"cores=${{SLURM_CPUS_PER_TASK:-${{SLURM_CPUS_ON_NODE:-{job.nproc}}}}}",
            f"export OMP_NUM_THREADS=$((cores > {job.nproc} ? cores / {job.nproc} : 1))",
        ]
    if site.container.runtime != "none":
        lines += ["export PYTHONNOUSERSITE=1  # the image's packages, not those in the home directory"]
    return "\n".join(lines) + "\n"


_MODULES = """\
# The sites' own code knows neither `set -u` nor, in a batch shell, always where it is.
set +u
if ! type module >/dev/null 2>&1; then
    for file in /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh; do
        # shellcheck source=/dev/null
        if [[ -r $file ]]; then source "$file"; fi
    done
fi"""


def _meeting(job: Job, site: Site) -> str:
    """Where the launchers of several nodes meet. Fewer nodes than the most may have been given."""
    if job.kind == "embed" or job.nodes == 1:
        return ""
    span = min(PORTS, 65536 - site.slurm.port)
    return f"""\
# The nodes meet on the first one, at a port of this job's own.
nodes=$SLURM_JOB_NUM_NODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
together=()
if ((nodes > 1)); then
    together=(--nnodes "{f"{job.min_nodes}:" if job.min_nodes < job.nodes else ""}$nodes"
        --rdzv-endpoint "${{hosts%%$'\\n'*}}:$(({site.slurm.port} + SLURM_JOB_ID % {span}))"
        --rdzv-id "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}")
fi
"""


def _command(job: Job, site: Site) -> str:
    elastic, several = job.min_nodes < job.nodes, job.kind != "embed" and job.nodes > 1
    step = ["srun", "--input=none", "--mpi=none", "--cpu-bind=none"]
    count = '"$SLURM_JOB_NUM_NODES"' if several else "1"
    step += [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    # Since 22.05 srun does not take it from sbatch.
    step.append('${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}')
    # A launcher that has left must not have srun end the others: they save, or the first one evaluates for an hour, or
    # an elastic run goes on. Those that wait for one that is gone know for how long.
    step += ["--kill-on-bad-exit=0", "--wait=0", *(["--no-kill"] if elastic else [])]
    contained = _container(job, site)
    if site.container.runtime == "pyxis":
        step += contained
    launcher: list[str] = []
    if site.container.runtime == "apptainer":
        launcher += contained
    if site.scratch is not None:
        launcher += ["sh", "-c", '"$on_node"', "sh", _expanded(site.scratch)]
    elif site.container.runtime == "pyxis":  # its file system can often not be written to
        launcher += ["sh", "-c", '"$on_node"', "sh", "/tmp"]  # noqa: S108  the user's part is made in it
    launcher += ["esmshard"] if site.container.runtime != "none" else [quote(_python(site)), "-m", "esmshard"]
    launcher += [quote(argument) for argument in job.arguments]
    if job.first_seed is not None:
        launcher += ['"train.seed=$seed"', '"out=$out"']
    launcher += ["--nproc", str(job.nproc)]
    if several:
        launcher += ['${together[@]+"${together[@]}"}']  # bash before 4.4 takes an empty one for unset
    if job.kind == "finetune":
        launcher += ["--max-restarts", str(job.max_restarts)]
    reason = "# One launcher a node: it starts the processes, passes signals on, and starts them again after a loss.\n"
    if '"$on_node"' in launcher:
        reason = _ON_NODE + reason
    return f"{reason}step=({_wrapped(step)})\ncommand=({_wrapped(launcher)})\n"


_ON_NODE = """\
# Caches and temporary files of each node. Made there, for Slurm replaces a TMPDIR that does not exist by /tmp.
# shellcheck disable=SC2016
on_node='mine=$1/esmshard-$(id -u) && (umask 077 && mkdir -p -- "$mine/cache" "$mine/tmp") &&
    export ESMSHARD_CACHE="$mine/cache" TMPDIR="$mine/tmp" && shift && exec "$@"'
"""


def _container(job: Job, site: Site) -> list[str]:
    """Options of srun, or a command before the command, by which it runs in a container."""
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
    # What the image sets comes before what the job exports, unless it is named here.
    words.append(f"--container-env={quote(','.join([*site.exports, 'ESMSHARD_JOB_ID', 'OMP_NUM_THREADS']))}")
    return words


def _mounts(job: Job, site: Site) -> list[str]:
    """SRC:DST of each: those of the profile, and then what else the run reads and writes."""
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in site.container.mounts]
    seen = [PurePosixPath(mount.split(":")[0]) for mount in mounts if mount.split(":")[0] == mount.split(":")[1]]
    # With a file comes what lies beside it: labels and coordinates belong to data.
    own = [job.directory, *(path if _parent(path) == "/" else _parent(path) for path in job.reads)]
    if job.kind != "doctor":
        own.append(_parent(job.out))
    for place in sorted(set(own), key=lambda path: (path.count("/"), path)):
        # Neither runtime can quote in what it splits; enroot's tables of mounts are split at blanks.
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
    """A word of bash, in which only variables of Slurm expand."""
    parts = re.split(rf"(\$\{{{OF_THE_JOB}\}})", text)
    return "".join(f'"{part}"' if n % 2 else quote(part) for n, part in enumerate(parts) if part)


def _parent(out: str) -> str:
    return str(PurePosixPath(out).parent)


def _python(site: Site) -> str:
    if site.python is None:
        raise UsageError("python: the job needs an interpreter; set it in the site profile")
    return site.python


def _wrapped(words: list[str]) -> str:
    """Words of an array, in lines; a word may have line breaks of its own."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 100:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else f"    {word}"
    return "\n" + "\n".join(lines) + "\n"


_STATUS = r"""# How the run stands. This host may have neither Python nor jq; status.json has a key a line.
field() { sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}\$/\1/p" "$2" 2>/dev/null || :; }
stamp() { printf '%s %s\n' "$(field attempt "$out/status.json")" "$(field started "$out/status.json")"; }
steps() { # of all folds, where there are several
    local total=0 file step
    for file in "$out"/status.json "$out"/*/status.json; do
        step=$(field step "$file")
        if [[ $step =~ ^[0-9]+$ ]]; then total=$((total + step)); fi
    done
    printf '%s\n' "$total"
}
ending() { # after exit code $1: what this start says of itself, or else what the code says
    # Another node wrote the file, and on NFS this one may not know it yet. To make a file here makes the listing fresh.
    if [[ -d $out ]]; then (: >"$out/.fresh-$job" && rm -f -- "$out/.fresh-$job") 2>/dev/null || :; fi
    if [[ $(stamp) != "$stamp_before" ]]; then
        field state "$out/status.json"
        return
    fi
    case $1 in
        0) echo 'done' ;;
        @PREEMPTED@) echo preempted ;;
        *) echo failed ;;
    esac
}
stamp_before=$(stamp)
""".replace("@PREEMPTED@", _PREEMPTED)

_PARTS = r"""# How far it is: the parts that all workers together have finished.
steps() {
    local parts
    shopt -s nullglob
    parts=("$out".partial/parts/*.json)
    printf '%s\n' "${#parts[@]}"
}
ending() { # after exit code $1; what a worker is at when it is asked to stop is computed again
    case $1 in
        0) echo 'done' ;;
        @PREEMPTED@) echo preempted ;;
        *) echo failed ;;
    esac
}
""".replace("@PREEMPTED@", _PREEMPTED)

_WAIT = """\
# Slurm signals the steps by itself. What comes to this shell alone goes on to srun, and from there to the tasks: as
# SIGUSR1, for a SIGTERM would have srun end them. A trap interrupts `wait`, which is then to be called again.
interrupted='' step_pid=''
trap 'interrupted=1; if [[ -n $step_pid ]]; then kill -USR1 "$step_pid" 2>/dev/null || :; fi' TERM USR1
"""

_RUN = """\
"${step[@]}" "${command[@]}" &
step_pid=$!
while :; do
    interrupted=''
    wait "$step_pid" && code=0 || code=$?
    if [[ -z $interrupted ]]; then break; fi
done
step_pid=''
"""

_DOCTOR = _RUN + 'exit "$code"\n'

_DECIDE = (
    "steps_before=$(steps)\n"
    + _RUN
    + r"""
state=$(ending "$code")
note=${out%/*}/.esmshard-idle-$job # how many starts in a row have done no step
forget() { rm -f -- "$note" || :; }
if [[ $state == 'done' ]]; then
    forget
    exit 0
elif [[ $state != preempted ]]; then
    forget
    say "the run ended with exit code $code (${state:-no status}) and is not started again"
    exit "$((code ? code : 1))"
fi
# A job that was cancelled is no longer RUNNING here, and `scontrol requeue` would bring it back to life. One that Slurm
# preempts and requeues by itself is not, either.
slurm_says=$(scontrol show job "$job" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p' || :)
if [[ $slurm_says != RUNNING ]]; then
    forget
    say "saved; Slurm itself is ending this job (${slurm_says:-unknown}), and decides whether it is started again"
    exit 75
fi
idle=0
if (($(steps) > steps_before)); then
    forget
else
    if [[ -r $note ]]; then read -r idle <"$note" || :; fi
    if [[ ! $idle =~ ^[0-9]$ ]]; then idle=0; fi
    idle=$((idle + 1))
    if ((idle >= @IDLE@)); then
        forget
        say "@IDLE@ starts in a row were preempted before they had done a step; raise the time limit, and sbatch again"
        exit 75
    fi
    printf '%s\n' "$idle" >"$note" || say "$note: cannot be written"
fi
if scontrol requeue "$job"; then
    say "saved, and back in the queue as job $job"
else
    say "saved, but Slurm does not requeue job $job; sbatch this file again, it goes on"
fi
exit 75
""".replace("@IDLE@", str(IDLE))
)
