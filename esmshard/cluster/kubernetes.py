"""A job as Kubernetes objects: an Indexed Job, and what its pods need to find and trust each other.

For Kubernetes 1.31 or later: `podFailurePolicy` is stable there, `successPolicy` and `podReplacementPolicy` are on by
default. Nothing goes through a shell: command and arguments are lists, values are quoted by the YAML library, and `$`
is doubled, since the kubelet replaces $(NAME) in arguments and variables.
"""

import hashlib
import re
from collections.abc import Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from esmshard.cluster.job import Job
from esmshard.cluster.site import Site
from esmshard.errors import UsageError

GRACE = 660
"""Seconds between SIGTERM and SIGKILL: the launcher gives its processes 600 s to save, and ends them itself after that.
A machine that is taken away in two minutes is taken away all the same."""

HEADER = """\
# For Kubernetes 1.31 or later: kubectl apply -f FILE. Before a job of this name is started anew: kubectl delete -f
# FILE. What was saved stays on the volume.
"""

_TAKEN = ("/tmp", "/dev/shm")  # noqa: S108  where each pod has volumes of its own
_LABEL = 63  # most characters of a DNS label, which names of pods, Jobs and Services are
_JOB_NAME = "batch.kubernetes.io/job-name"  # labels that the Job controller gives to its pods
_JOB_UID = "batch.kubernetes.io/controller-uid"
# Plain in YAML 1.1, which kubectl reads, and 1.2 alike. All else is quoted: `yes`, `1e3`, `0x1f`, `12:30`, `null`.
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/][A-Za-z0-9_./-]*", re.IGNORECASE)


def render(job: Job, site: Site) -> str:
    """YAML documents for `kubectl apply`: as needed ConfigMap, Service and NetworkPolicy, and the Job.

    Raises:
        UsageError: the profile lacks what Kubernetes cannot do without, or something cannot be said in its words.
    """
    _check(job, site)
    pods = job.array if job.kind == "embed" else job.nodes
    together = pods > 1 and job.kind != "embed"
    name = _dns_label(job.name, pods)
    metadata = {
        "name": name,
        "namespace": site.kubernetes.namespace,
        "labels": {
            **site.kubernetes.labels,
            "app.kubernetes.io/name": "esmshard",
            "app.kubernetes.io/component": job.kind,
        },
    }
    documents = [_job(job, site, metadata, pods, together)]
    if together:
        documents = [_service(site, metadata), _network_policy(metadata), *documents]
    if job.recipe_text is not None:
        documents = [_config_map(job.recipe_text, metadata), *documents]
    yaml = YAML()
    yaml.width = 1000
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = StringIO(HEADER)
    out.seek(0, 2)
    for document in documents:
        out.write("---\n")
        yaml.dump(_quoted(document), out)
    return out.getvalue()


def _check(job: Job, site: Site) -> None:
    wanted = site.kubernetes
    problems = []
    if not site.container.image:
        problems.append("Kubernetes runs images only; set container.image in the site profile")
    elif site.container.image.startswith("/") or site.container.image.endswith((".sif", ".sqsh")):
        problems.append(f"container.image is the file {site.container.image}; Kubernetes needs a name in a registry")
    if not wanted.claim:
        problems.append(
            "the pods need a volume for data and results; set kubernetes.claim in the site profile to the name of a "
            "PersistentVolumeClaim"
        )
    if not re.fullmatch(r"/[^:]*[^:/]", wanted.mount) or wanted.mount in _TAKEN:
        problems.append(f"kubernetes.mount is '{wanted.mount}'; set an absolute path of its own, such as /work")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", wanted.namespace):
        problems.append(
            f"kubernetes.namespace is '{wanted.namespace}'; a name has at most 63 lower-case letters, digits and '-'"
        )
    if job.recipe_text is not None:
        path = job.arguments[1]
        if ":" in path or not path.startswith(wanted.mount + "/"):
            problems.append(f"{path}: pods see a recipe only below {wanted.mount}, and its name may have no ':'")
        if len(job.recipe_text.encode(errors="replace")) > 2**17:  # kubectl keeps 256 KiB of an object in a note on it
            problems.append(f"{path}: a recipe of more than 128 KiB cannot travel with the job; make it shorter")
    for text in (*job.arguments, *site.exports.values(), job.recipe_text or ""):
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            problems.append(f"{text!r}: only Unicode text can be given to Kubernetes; rename what is called so")
    if problems:
        raise UsageError(*problems)


def _dns_label(text: str, pods: int) -> str:
    """A name of a Service, and of a Job whose pods are called NAME-INDEX, made of any text; always the same one.

    >>> _dns_label("Contact, lr=1e-4", 2)
    'contact-lr-1e-4'
    >>> _dns_label("650M", 1)
    'esmshard-650m'
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not re.match("[a-z]", label):  # a Service has to begin with a letter
        label = f"esmshard-{label}".rstrip("-")
    room = _LABEL - len(f"-{pods - 1}")
    if len(label) <= room and text.isascii() and text:
        return label
    # Two names must not become one because of what is left out.
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{label[: room - len(digest) - 1].rstrip('-')}-{digest}"


def _job(job: Job, site: Site, metadata: dict[str, Any], pods: int, together: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # Of pods, and all of a run fail together. What a doctor finds is not healed by asking again.
        "backoffLimit": 0 if job.kind == "doctor" else job.max_restarts * pods,
        # Two pods of one index would be two launchers of one node.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # The command or the recipe is wrong, and stays so.
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                # Saved, start me again; and ended by SIGTERM before there was anything to save.
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75, 143]}},
                # Preempted, evicted, or its node was lost: killed before it had saved.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
    }
    if together and job.kind == "finetune":
        # Launchers agree on the end: one that leaves with 0 says that all is done on all machines. Without this, a pod
        # that was replaced at the very end, or that an elastic run did without, would wait for the others in vain.
        spec["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    spec["template"] = {"metadata": {"labels": metadata["labels"]}, "spec": _pod(job, site, metadata, together)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _pod(job: Job, site: Site, metadata: dict[str, Any], together: bool) -> dict[str, Any]:
    wanted = site.kubernetes
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # with any other the Job never sees an exit code
        "terminationGracePeriodSeconds": GRACE,
        # The command is not process 1 then. The kernel keeps signals from that one until it listens, and SIGTERM in the
        # first seconds would be lost; and the pause container buries orphans, whatever the image has.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": wanted.user,
            "runAsGroup": wanted.user,
            "fsGroup": wanted.user,
            "fsGroupChangePolicy": "OnRootMismatch",  # else every file of the volume is looked at, at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if together:
        pod["subdomain"] = metadata["name"]  # with the Job's NAME-INDEX as host name: NAME-INDEX.NAME.NAMESPACE.svc
    if wanted.pull_secret:
        pod["imagePullSecrets"] = [{"name": wanted.pull_secret}]
    if wanted.node_selector:
        pod["nodeSelector"] = dict(wanted.node_selector)
    if wanted.tolerations:
        pod["tolerations"] = [
            {
                key: int(value) if key == "tolerationSeconds" and value.isdecimal() else value
                for key, value in one.items()
            }
            for one in wanted.tolerations
        ]
    pod["containers"] = [_container(job, site, metadata, together)]
    pod["volumes"] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": wanted.claim}},
        {"name": "tmp", "emptyDir": {}},
        # What lies there counts as memory of the pod.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.shm}},
    ]
    if job.recipe_text is not None:
        pod["volumes"].append({"name": "recipe", "configMap": {"name": metadata["name"]}})
    return pod


def _container(job: Job, site: Site, metadata: dict[str, Any], together: bool) -> dict[str, Any]:
    wanted = site.kubernetes
    limits = {"cpu": _share(wanted.cpu, job, site), "memory": _share(wanted.memory, job, site)} | wanted.resources
    limits = {resource: quantity for resource, quantity in limits.items() if quantity is not None}
    if job.gpus_per_node:
        limits[wanted.gpu_resource] = str(job.gpus_per_node)
    rdma = any(re.search("rdma|hca|infiniband", resource) for resource in wanted.resources)
    container: dict[str, Any] = {
        "name": "esmshard",
        "image": site.container.image,
        "command": ["esmshard"],
        "args": [_literal(argument) for argument in job.arguments] + _options(job, site, metadata, together),
        "workingDir": wanted.mount,
        "env": _environment(job, site, metadata, together),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            # RDMA locks the memory that cards read from.
            "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})},
        },
    }
    if wanted.secret:
        container["envFrom"] = [{"secretRef": {"name": wanted.secret}}]
    if limits:
        container["resources"] = {"limits": limits}  # and requests, which are the same by default
    container["volumeMounts"] = [
        {"name": "work", "mountPath": wanted.mount},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  the pod's own
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    if job.recipe_text is not None:
        # At the volume's root, as its paths are relative to it. The runtime makes an empty file there to mount it on.
        container["volumeMounts"].append(
            {"name": "recipe", "mountPath": job.arguments[1], "subPath": "recipe.yaml", "readOnly": True}
        )
    return container


def _options(job: Job, site: Site, metadata: dict[str, Any], together: bool) -> list[str]:
    """What the scheduler knows of the command line."""
    options = ["--nproc", str(job.nproc)]
    if together:
        name, service = metadata["name"], f"{metadata['name']}.{metadata['namespace']}.svc"
        options += ["--nnodes", f"{job.min_nodes}:{job.nodes}"]
        options += ["--rdzv-endpoint", f"{name}-0.{service}:{site.kubernetes.port}", "--rdzv-id", name]
        if job.kind == "finetune":
            options += ["--local-addr", "$(POD_IP)"]  # known from the start, unlike the pod's own name in the DNS
    if job.kind == "finetune":
        options += ["--max-restarts", str(job.max_restarts)]
    return options


def _environment(job: Job, site: Site, metadata: dict[str, Any], together: bool) -> list[dict[str, Any]]:
    values = {
        "HOME": "/tmp",  # noqa: S108
        "USER": "esmshard",  # the image may not know the user id, and torch asks for a name
        "ESMSHARD_CACHE": "/tmp/esmshard",  # noqa: S108
    }
    if (cores := _cores(_share(site.kubernetes.cpu, job, site))) is not None:
        # Processes see all cores of the machine, and would start as many threads.
        values["OMP_NUM_THREADS"] = str(max(1, cores // job.nproc))
    variables: list[dict[str, Any]] = []
    if job.kind == "finetune" and together:
        variables.append(_field("POD_IP", "status.podIP"))
    if job.kind == "finetune" and "ESMSHARD_JOB_ID" not in site.exports:
        # The same for pods that replace others, and another one when the Job is made anew.
        variables.append(_field("JOB_UID", f"metadata.labels['{_JOB_UID}']"))
        variables.append({"name": "ESMSHARD_JOB_ID", "value": f"{metadata['name']}-$(JOB_UID)"})
    exported = {key: _literal(value) for key, value in (values | site.exports).items()}
    return [*variables, *({"name": key, "value": value} for key, value in exported.items())]


def _field(name: str, path: str) -> dict[str, Any]:
    """A variable with what the pod is told of itself."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _share(quantity: str | None, job: Job, site: Site) -> str | None:
    """Of what a pod with all GPUs of a node gets, the part of one with fewer: others have to fit beside it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", quantity or "")
    if found is None or not site.gpus_per_node or not 0 < job.gpus_per_node < site.gpus_per_node:
        return quantity
    share = float(found[1]) * job.gpus_per_node / site.gpus_per_node
    return f"{int(share * 8) / 8:.12g}{found[2]}"  # eighths: whole bytes, and no digits without end


def _cores(cpu: str | None) -> int | None:
    """Whole cores of a quantity, as 16, 7.5 or 7500m.

    >>> _cores("7500m")
    7
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", cpu or "")
    return None if found is None else int(float(found[1]) / (1000 if found[2] else 1))


def _service(site: Site, metadata: dict[str, Any]) -> dict[str, Any]:
    """Gives the pods names that outlive them; without an address of its own."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # they look for each other before they are ready
        "selector": {_JOB_NAME: metadata["name"]},
        "ports": [{"name": "rendezvous", "port": site.kubernetes.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _network_policy(metadata: dict[str, Any]) -> dict[str, Any]:
    """Only pods of the job may connect to its pods: neither the store nor NCCL asks who calls. NCCL takes any port."""
    same = {"podSelector": {"matchLabels": {_JOB_NAME: metadata["name"]}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {**same, "policyTypes": ["Ingress"], "ingress": [{"from": [same]}]},
    }


def _config_map(recipe: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """The recipe. It cannot be changed under a run, which a pod that starts later would refuse to go on with."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {"recipe.yaml": recipe},
    }


def _literal(text: str) -> str:
    """As the kubelet has to read it, so that the command sees `text`."""
    return text.replace("$", "$$")


def _quoted(node: Any) -> Any:
    """Strings that any parser of YAML reads as strings."""
    if isinstance(node, Mapping):
        return {_quoted(key): _quoted(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_quoted(value) for value in node]
    if not isinstance(node, str) or _PLAIN.fullmatch(node):
        return node
    # A block for people, where it keeps every character.
    if (
        node.endswith("\n")
        and not node.startswith((" ", "\n"))
        and all(line.isprintable() and not line.endswith(" ") for line in node[:-1].split("\n"))
    ):
        return LiteralScalarString(node)
    return DoubleQuotedScalarString(node)
