#!/bin/bash
#SBATCH --job-name={{ name }}
{% if job.kind == "embed" %}
#SBATCH --array=0-{{ job.array - 1 }}
{% endif %}
{% for option in ("partition", "account") if site.slurm[option] %}
#SBATCH --{{ option }}={{ site.slurm[option] }}
{% endfor %}
{% if time %}
#SBATCH --time={{ time }}
{% endif %}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ tasks }}
{% if gpus %}
#SBATCH {{ gpus }}
{% endif %}
{% if cores %}
#SBATCH --cpus-per-task={{ cores }}
{% endif %}
{% if gpus and site.slurm.memory_per_gpu %}
#SBATCH --mem-per-gpu={{ site.slurm.memory_per_gpu }}
{% endif %}
#SBATCH --output={{ name }}-{{ "%A_%a" if job.kind == "embed" else "%j" }}.out
#SBATCH --open-mode=append
{% if job.kind != "doctor" %}
#SBATCH --signal=B:USR1@{{ site.slurm.grace }}
#SBATCH --requeue
{% endif %}
{% for option in site.slurm.options %}
#SBATCH {{ option }}
{% endfor %}

# shellcheck disable=SC2016  # a $ in single quotes is meant as it stands
{% if job.kind != "doctor" %}
# Submit this file with `sbatch` as often as you like: what is saved is not computed again.
{% endif %}
set -e
cd -- {{ job.directory | quote }}
{% for line in site.slurm.setup %}
{{ line }}
{% endfor %}
{% for variable, value in site.exports.items() %}
export {{ variable }}={{ value | quote }}
{% endfor %}
{% if "OMP_NUM_THREADS" not in site.exports %}
threads=$(({{ "SLURM_CPUS_PER_TASK" if cores else "SLURM_CPUS_ON_NODE" }} / {{ processes }}))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) # the cores of a process
{% endif %}
{% if container.runtime != "none" %}
export PYTHONNOUSERSITE=1 # the packages of the image, not those of the home directory
{% endif %}
{% if container.runtime == "pyxis" %}
export ESMSHARD_CACHE=${ESMSHARD_CACHE-/tmp/esmshard-$UID} # the image itself may be read-only
{% endif %}

# Workers of `embed` end hours apart, whatever the WaitTime of the site is; and the doctor goes on after a bad node.
step() {
    exec srun --mpi=none --cpu-bind=none --kill-on-bad-exit={{ 0 if job.kind == "doctor" else 1 }} --wait=0 \
{% if cores %}
        --cpus-per-task="$SLURM_CPUS_PER_TASK" \
{% endif %}
{% if container.runtime == "pyxis" %}
        --container-image={{ container.image | quote }} --container-mounts={{ mounts }} \
        --container-workdir={{ job.directory | quote }} --no-container-mount-home \
        --container-env={{ (site.exports | list + ["OMP_NUM_THREADS", "ESMSHARD_CACHE", "TMPDIR"]) | unique | join(",") }} \
{% elif container.runtime == "apptainer" %}
        apptainer exec {{ "--nv " if job.gpus_per_node }}--bind={{ mounts }} \
        --pwd={{ job.directory | quote }} {{ container.image | quote }} \
{% endif %}
        {{ site.python | quote ~ " -m " if container.runtime == "none" }}esmshard {{ arguments | join(" ") }}
}

{% if job.kind == "doctor" %}
step
{% else %}
# Slurm sends USR1 to this shell before the time limit. srun passes it on to the tasks; at a TERM it would end them.
asked='' code=75 starts=0
trap 'asked=yes interrupted=yes; kill -USR1 "$srun" 2>/dev/null || :' TERM USR1
while [[ ! $asked ]]; do
    step &
    srun=$! interrupted=yes
    while [[ $interrupted ]]; do # a signal interrupts `wait`
        interrupted=''
        wait "$srun" && code=0 || code=$?
    done
    case $code in
        75 | 138) break ;; # asked to stop, and saved
        69 | 70 | 134 | 135 | 137 | 139 | 143) # a process was lost, and srun ended the others
            ((++starts < {{ starts }})) || exit "$code"
            echo "esmshard: a process was lost (exit code $code)" >&2 ;;
        *) exit "$code" ;; # done, or a mistake that would only come again
    esac
done

# Back into the queue. Not where Slurm itself ends the job: this would bring one that was cancelled back to life.
job={{ "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.kind == "embed" else "$SLURM_JOB_ID" }}
if scontrol show job "$job" | grep -q JobState=RUNNING; then
    scontrol requeue "$job" || echo "esmshard: job $job is not requeued; sbatch this file again, it goes on" >&2
fi
exit 75
{% endif %}
