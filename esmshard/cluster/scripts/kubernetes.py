"""A job as Kubernetes objects: an Indexed Job, and objects by which its pods find and trust each other.

Kubernetes must be 1.31 or later: `podFailurePolicy` is stable there, `successPolicy` and `podReplacementPolicy` are on
by default. A single pod runs `esmshard ... --nproc N`. If a run has several pods, each starts torchrun, inside the
shell program torchrun_wrapper.sh.

No value is inserted into shell code: command and arguments are lists, and the YAML library quotes values. `$` is
doubled where the kubelet would replace it, in $(NAME). This file is longer than others, because the objects of one job
refer to each other by names and labels that must agree.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from esmshard.cluster.scripts import site as site_profile
from esmshard.cluster.scripts.scheduler_job import SchedulerJob
from esmshard.cluster.scripts.site import Site
from esmshard.errors import UsageError

GRACE = 660
"""The seconds between SIGTERM and SIGKILL. `--nproc N` gives its processes 600 s to save, and then kills them. Under
torchrun the processes have all of these seconds. A machine that is taken away after two minutes ends earlier.
"""

HEADER = """\
# For Kubernetes 1.31 or later: kubectl apply -f FILE. Before a job of this name is started anew: kubectl delete -f
# FILE. What was saved stays on the volume.
"""

_WRAPPER = Path(__file__).with_name("torchrun_wrapper.sh")
_TORCHRUN = ("python", "-m", "torch.distributed.run")
"""The program `torchrun` of the interpreter that has esmshard, since an image may have another torchrun."""
_RENDEZVOUS = "join_timeout=600,read_timeout=600"  # in seconds; pods of one run may start minutes apart

_TAKEN = ("/tmp", "/dev/shm")  # noqa: S108  # each pod has volumes of its own there
_LABEL = 63  # the most characters of a DNS label, for names of pods, Jobs and Services
_JOB_NAME = "batch.kubernetes.io/job-name"  # a label that the Job controller gives to its pods
_JOB_UID = "batch.kubernetes.io/controller-uid"
# Texts that are plain in YAML 1.1 (kubectl) and 1.2. All others are quoted: `yes`, `1e3`, `0x1f`, `12:30`, `null`.
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/][A-Za-z0-9_./-]*", re.IGNORECASE)


def render(job: SchedulerJob, site: Site) -> str:
    """Return YAML documents for `kubectl apply`: the Job, and if needed ConfigMap, Service and NetworkPolicy.

    Raises:
        UsageError: if the profile lacks a value that Kubernetes requires, or a value cannot be expressed.
    """
    _check(job, site)
    pods = job.array if job.kind == "embed" else job.nodes
    together = pods > 1 and job.kind != "embed"
    name = _dns_label(job.name, f"-{pods - 1}")
    metadata = {
        "name": name,
        "namespace": site.kubernetes.namespace,
        "labels": {
            **site.kubernetes.labels,
            "app.kubernetes.io/name": "esmshard",
            "app.kubernetes.io/component": job.kind,
        },
    }
    pod = _pod(job, site, metadata, together)
    documents = [_service(site, metadata), _network_policy(metadata)] if together else []
    documents.append(_job(job, metadata, pods, together, pod))
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


def _check(job: SchedulerJob, site: Site) -> None:
    wanted = site.kubernetes
    problems = []
    if not site.container.image:
        problems.append(f"Kubernetes runs images only; set container.image in the site profile, {site_profile.path()}")
    elif site.container.image.startswith("/") or site.container.image.endswith((".sif", ".sqsh")):
        problems.append(f"container.image is the file {site.container.image}; Kubernetes needs a name in a registry")
    if not wanted.claim:
        problems.append(
            "the pods need a volume for data and results; set kubernetes.claim in the site profile, "
            f"{site_profile.path()}, to the name of a PersistentVolumeClaim"
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
        # kubectl stores up to 256 KiB of an object in an annotation
        if len(job.recipe_text.encode(errors="replace")) > 2**17:
            problems.append(f"{path}: a recipe of more than 128 KiB cannot travel with the job; make it shorter")
    for text in (*job.arguments, *site.exports.values(), job.recipe_text or ""):
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            problems.append(f"{text!r}: only Unicode text can be given to Kubernetes; rename what is called so")
    if problems:
        raise UsageError(*problems)


def _dns_label(text: str, suffix: str) -> str:
    """Convert any text to a name of a Service, and of a job with pods NAME + `suffix`. The result is always the same.

    >>> _dns_label("Contact, lr=1e-4", "-1")
    'contact-lr-1e-4'
    >>> _dns_label("650M", "-0")
    'esmshard-650m'
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not re.match("[a-z]", label):  # the name of a Service must begin with a letter
        label = f"esmshard-{label}".rstrip("-")
    room = _LABEL - len(suffix)
    if len(label) <= room and text.isascii() and text:
        return label
    # The digest keeps two texts apart that differ only in characters that are left out.
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{label[: room - len(digest) - 1].rstrip('-')}-{digest}"


def _job(job: SchedulerJob, metadata: dict[str, Any], pods: int, together: bool, pod: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        # This counts pods, and all pods of a run fail together. torchrun returns 1 for any failure, also for exit code
        # 2 of a wrong recipe, so a run with several nodes is repeated in this case, too. The findings of a doctor would
        # be the same in a second run.
        "backoffLimit": 0 if job.kind == "doctor" else job.max_restarts * pods,
        # Two pods of one index would be two launchers of one node.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # The command or the recipe is wrong. Only a pod without torchrun returns this exit code.
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                # The run has saved and must be started again; or SIGTERM came before there was anything to save.
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75, 143]}},
                # The pod was preempted or evicted, or its node was lost, before the run had saved.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
    }
    if together and job.kind == "finetune":
        # A pod returns 0 when status.json says that the run is done. Without this rule, a pod that was replaced at the
        # very end, or that an elastic run lost, would wait for the others forever.
        spec["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    spec["template"] = {"metadata": {"labels": metadata["labels"]}, "spec": pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _pod(job: SchedulerJob, site: Site, metadata: dict[str, Any], together: bool) -> dict[str, Any]:
    wanted = site.kubernetes
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # with any other policy the Job never sees an exit code
        "terminationGracePeriodSeconds": GRACE,
        # The command is then not process 1. The kernel withholds signals from process 1 until it listens, so SIGTERM in
        # the first seconds would be lost. The pause container also collects ended processes, in every image.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": wanted.user,
            "runAsGroup": wanted.user,
            "fsGroup": wanted.user,
            "fsGroupChangePolicy": "OnRootMismatch",  # otherwise each start would check every file of the volume
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if together:
        # the host name is the Job's NAME-INDEX, so this gives NAME-INDEX.NAME.NAMESPACE.svc
        pod["subdomain"] = metadata["name"]
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
        # Files in this volume count as memory of the pod.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.shm}},
    ]
    if job.recipe_text is not None:
        pod["volumes"].append({"name": "recipe", "configMap": {"name": metadata["name"]}})
    return pod


def _container(job: SchedulerJob, site: Site, metadata: dict[str, Any], together: bool) -> dict[str, Any]:
    wanted = site.kubernetes
    limits = {"cpu": _share(wanted.cpu, job, site), "memory": _share(wanted.memory, job, site)} | wanted.resources
    limits = {resource: quantity for resource, quantity in limits.items() if quantity is not None}
    if job.gpus_per_node:
        limits[wanted.gpu_resource] = str(job.gpus_per_node)
    rdma = any(re.search("rdma|hca|infiniband", resource) for resource in wanted.resources)
    container: dict[str, Any] = {
        "name": "esmshard",
        "image": site.container.image,
        **_command(job, site, metadata, together),
        "workingDir": wanted.mount,
        "env": _environment(job, site, metadata, together),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            # RDMA locks the memory that cards read.
            "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})},
        },
    }
    if wanted.secret:
        container["envFrom"] = [{"secretRef": {"name": wanted.secret}}]
    if limits:
        container["resources"] = {"limits": limits}  # requests are the same by default
    container["volumeMounts"] = [
        {"name": "work", "mountPath": wanted.mount},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  the pod's own
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    if job.recipe_text is not None:
        # The mount is at the volume's root, since paths are relative to it. The runtime creates an empty file as mount
        # point.
        container["volumeMounts"].append(
            {"name": "recipe", "mountPath": job.arguments[1], "subPath": "recipe.yaml", "readOnly": True}
        )
    return container


def _command(job: SchedulerJob, site: Site, metadata: dict[str, Any], together: bool) -> dict[str, list[str]]:
    """Return command and arguments of the container: `esmshard` in a single pod, else torchrun in its wrapper."""
    arguments = [_literal(argument) for argument in job.arguments]
    if not together:
        arguments += ["--nproc", str(job.nproc)]
        if job.kind == "embed" and job.array > 1:
            arguments += ["--worker", f"$(WORKER)/{job.array}"]
        if job.kind == "finetune":
            arguments += ["--max-restarts", str(job.max_restarts)]
        return {"command": ["esmshard"], "args": arguments}
    status = ""
    if job.kind == "finetune":
        # The wrapper needs the run's directory, also if the recipe's `out` has variables. The value is JSON where YAML
        # could read it otherwise.
        out = job.out if re.fullmatch(r"/[\w./-]+", job.out) else json.dumps(job.out, ensure_ascii=False)
        arguments.append(_literal(f"out={out}"))
        status = _literal(f"{job.out}/status.json")
    command = ["sh", "-c", _literal(_WRAPPER.read_text(encoding="utf-8")), _WRAPPER.name, status]
    # The pods of an Indexed Job find each other by these options.
    name, namespace = metadata["name"], metadata["namespace"]
    options = {
        "nnodes": f"{job.min_nodes}:{job.nodes}",
        "nproc-per-node": str(job.nproc),
        "max-restarts": str(job.max_restarts if job.kind == "finetune" else 0),
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{name}-0.{name}.{namespace}.svc:{site.kubernetes.port}",
        "rdzv-id": name,
        "local-addr": "$(POD_IP)",  # known from the start, unlike the pod's own name in the DNS
    }
    torchrun = [*_TORCHRUN, *(word for key, value in options.items() for word in (f"--{key}", value))]
    return {"command": command, "args": [*torchrun, "-m", "esmshard", *arguments]}


def _environment(job: SchedulerJob, site: Site, metadata: dict[str, Any], together: bool) -> list[dict[str, Any]]:
    values = {
        "HOME": "/tmp",  # noqa: S108
        "USER": "esmshard",  # the image may not know the user id, but torch needs a name
        "ESMSHARD_CACHE": "/tmp/esmshard",  # noqa: S108
    }
    if (cores := _cores(_share(site.kubernetes.cpu, job, site))) is not None:
        # Processes see all cores of the machine, and would start as many threads.
        values["OMP_NUM_THREADS"] = str(max(1, cores // job.nproc))
    variables: list[dict[str, Any]] = []
    if together:
        variables.append(_field("POD_IP", "status.podIP"))
        values["PET_RDZV_CONF"] = _RENDEZVOUS  # torchrun's own variable for --rdzv-conf; the wrapper adds to it
        # Restarted processes must not read the addresses of the processes before them.
        values["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if job.kind == "embed" and job.array > 1:
        variables.append(_field("WORKER", "metadata.annotations['batch.kubernetes.io/job-completion-index']"))
    if job.kind == "finetune" and "ESMSHARD_JOB_ID" not in site.exports:
        # The value stays the same for pods that replace others, and changes with a new Job.
        variables.append(_field("JOB_UID", f"metadata.labels['{_JOB_UID}']"))
        variables.append({"name": "ESMSHARD_JOB_ID", "value": f"{metadata['name']}-$(JOB_UID)"})
    exported = {key: _literal(value) for key, value in (values | site.exports).items()}
    return [*variables, *({"name": key, "value": value} for key, value in exported.items())]


def _field(name: str, path: str) -> dict[str, Any]:
    """Return a variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _share(quantity: str | None, job: SchedulerJob, site: Site) -> str | None:
    """Return a pod's part of the resource of a whole node, by its share of the GPUs. Other pods then fit, too."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", quantity or "")
    if found is None or not site.gpus_per_node or not 0 < job.gpus_per_node < site.gpus_per_node:
        return quantity
    share = float(found[1]) * job.gpus_per_node / site.gpus_per_node
    return f"{int(share * 8) / 8:.12g}{found[2]}"  # eighths give whole bytes and no endless digits


def _cores(cpu: str | None) -> int | None:
    """Return the whole cores of a quantity, such as 16, 7.5 or 7500m.

    >>> _cores("7500m")
    7
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", cpu or "")
    return None if found is None else int(float(found[1]) / (1000 if found[2] else 1))


def _service(site: Site, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a Service without an address of its own, which gives the pods names that stay when pods are replaced."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods look for each other before they are ready
        "selector": {_JOB_NAME: metadata["name"]},
        "ports": [{"name": "rendezvous", "port": site.kubernetes.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _network_policy(metadata: dict[str, Any]) -> dict[str, Any]:
    """Allow only pods of the job to connect: neither the store nor NCCL checks callers, and NCCL uses any port."""
    same = {"podSelector": {"matchLabels": {_JOB_NAME: metadata["name"]}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {**same, "policyTypes": ["Ingress"], "ingress": [{"from": [same]}]},
    }


def _config_map(recipe: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe as a ConfigMap that cannot be changed. A later pod would refuse a changed recipe."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {"recipe.yaml": recipe},
    }


def _literal(text: str) -> str:
    """Escape a text for the kubelet, which replaces $(NAME) and reads $$ as $, so that the command gets `text`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _quoted(node: Any) -> Any:
    """Mark strings so that any YAML parser reads them as strings."""
    if isinstance(node, Mapping):
        return {_quoted(key): _quoted(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_quoted(value) for value in node]
    if not isinstance(node, str) or _PLAIN.fullmatch(node):
        return node
    # A block is readable; it is used where it keeps every character.
    if (
        node.endswith("\n")
        and not node.startswith((" ", "\n"))
        and all(line.isprintable() and not line.endswith(" ") for line in node[:-1].split("\n"))
    ):
        return LiteralScalarString(node)
    return DoubleQuotedScalarString(node)
