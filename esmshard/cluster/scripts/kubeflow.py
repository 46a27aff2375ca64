"""A job as a `TrainJob` of Kubeflow Trainer 2.3 or later, for clusters that run all training through Trainer.

The administrator's runtime defines the Job; a TrainJob adds the command, the number of nodes and volumes.
Trainer sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which torchrun reads.
"""

from typing import Any

from esmshard.cluster.scripts.scheduler_job import SchedulerJob
from esmshard.cluster.scripts.site import Site

NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of all pods of a TrainJob; its value is the name of the TrainJob."""

UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
"""The label of the pods whose value stays the same while pods are replaced, and changes with a new TrainJob."""

NAME_SUFFIX = "-node-0-{}-abcde"
"""The end of the names of a TrainJob's pods: a replicated job, its index, that of the pod, and five random characters.
"""

_NODE = "node"  # the runtime's replicated job for training, and its container
_PATCHES = (  # the fields of a pod that a TrainJob may set
    "terminationGracePeriodSeconds",
    "securityContext",
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "volumes",
)


def problems(job: SchedulerJob, site: Site) -> list[str]:
    """Return the properties that a TrainJob cannot express, one sentence each."""
    found = []
    if job.min_nodes != job.nodes:
        found.append(
            f"--nodes {job.min_nodes}:{job.nodes}: a TrainJob runs on a fixed number of nodes; pass --nodes "
            f"{job.nodes}, or remove kubernetes.trainer from the site profile"
        )
    if site.kubernetes.secret is not None:
        found.append(
            f"kubernetes.secret is {site.kubernetes.secret}, and a TrainJob cannot take all keys of a Secret; remove "
            f"it, and give the Secret to the container `{_NODE}` of the runtime {site.kubernetes.trainer} (envFrom)"
        )
    return found


def train_job(pod: dict[str, Any], metadata: dict[str, Any], runtime: str, nodes: int, nproc: int) -> dict[str, Any]:
    """Return the TrainJob that runs a pod on each of several nodes.

    Args:
        pod: the specification of a pod with one container, as in an Indexed Job. Fields that only the runtime sets,
            such as the restart policy, are left out.
        metadata: name, namespace and labels.
        runtime: the name of the ClusterTrainingRuntime.
        nodes: the number of nodes.
        nproc: the number of processes of each node.
    """
    (container,) = pod["containers"]
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "args": container["args"],
        "env": container["env"],
        "numNodes": nodes,
        "numProcPerNode": nproc,
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    changed = {"name": _NODE} | {key: container[key] for key in ("volumeMounts", "securityContext")}
    patch = {key: pod[key] for key in _PATCHES if key in pod} | {"containers": [changed]}
    of_pods = {"metadata": {"labels": metadata["labels"]}, "spec": patch}
    replicated = {"name": _NODE, "template": {"spec": {"template": of_pods}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": runtime},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "esmshard/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }
