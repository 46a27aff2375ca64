#!/bin/bash
# Renders the examples anew: `bash deploy/slurm/render.sh`, or into another directory: `... render.sh DIR`.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
to=$(cd -- "${1:-$here}" && pwd)
cd / # a script names the directory that it was made in

render() { # FILE PROFILE ARGUMENTS of esmshard launch
    ESMSHARD_SITE=$here/$2 esmshard launch "${@:3:1}" --target slurm --dry-run "${@:4}" >"$to/$1"
}

render one-node.sbatch site.yaml contact out=/shared/runs/contact
render two-nodes.sbatch site.yaml contact model.name=esm2_t33_650M_UR50D out=/shared/runs/contact-650m --nodes 2
render pyxis.sbatch pyxis.yaml contact model.name=esm2_t33_650M_UR50D out=/shared/runs/contact-650m --nodes 2
render apptainer.sbatch apptainer.yaml contact model.name=esm2_t33_650M_UR50D out=/shared/runs/contact-650m --nodes 2
render embed-array.sbatch site.yaml embed --array 16 -- esm2_t33_650M_UR50D /shared/proteins.fasta.gz -o /shared/embeddings
render doctor.sbatch site.yaml doctor --nodes 2
