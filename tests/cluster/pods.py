"""What is rendered for Kubernetes, as kubectl reads it, and its pods as processes of this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml as pyyaml  # an independent parser; and of YAML 1.1, as is kubectl's

from esmshard.cluster.launch import Job, render
from esmshard.cluster.site import Site

BARE = {"container": {"image": "esmshard"}, "kubernetes": {"claim": "data"}}
FULL = {
    "exports": {"NCCL_SOCKET_IFNAME": "ib0", "ESMSHARD_CACHE": "/work/cache"},
    "container": {"image": "registry.example.org:5000/team/esmshard:1.2"},
    "kubernetes": {
        "namespace": "protein-models",
        "claim": "team-data",
        "mount": "/mnt/team",
        "gpu_resource": "amd.com/gpu",
        "cpus_per_gpu": 12,
        "memory_per_gpu": "64Gi",
        "shm": "32Gi",
        "resources": {"rdma/hca": "1"},
        "pod": {
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"zone": "on"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}],
        },
        "labels": {"kueue.x-k8s.io/queue-name": "team-a"},
        "secret": "tracker-keys",
        "user": 4321,
        "port": 30001,
    },
}


def run(**changes: Any) -> Job:
    """A run of two nodes, with what is to be different."""
    values: dict[str, Any] = {"name": "contact", "kind": "finetune", "out": "/work/runs/contact"}
    values |= {"arguments": ("finetune", "contact", "optim.lr=1e-4", "--resume", "auto")}
    values |= {"nodes": 2, "min_nodes": 1, "gpus_per_node": 8, "nproc": 8}
    return Job(**values | changes)


def objects(job: Job, site: dict[str, Any]) -> dict[str, Any]:
    """By kind, as kubectl reads them."""
    documents = [
        document for document in pyyaml.safe_load_all(render(job, Site.model_validate(site), "kubernetes")) if document
    ]
    kinds = [document["kind"] for document in documents]
    assert len(set(kinds)) == len(kinds)
    return dict(zip(kinds, documents, strict=True))


def _expanded(text: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of an argument: $(NAME) by its value, if it has one; $$ by $."""
    return re.sub(
        r"\$(\$|\(([^)]*)\)|.)",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]) if found[2] else found[0],
        text,
        flags=re.DOTALL,
    )


def environment(container: dict[str, Any], index: int) -> dict[str, str]:
    """Variables of a pod's container, in which each may name those before it."""
    fields = {
        "metadata.labels['batch.kubernetes.io/controller-uid']": "0f5c-77",
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "status.podIP": f"10.0.0.{index + 1}",
    }
    known: dict[str, str] = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            known[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            known[variable["name"]] = _expanded(variable["value"], known)
    return known


def command(container: dict[str, Any], index: int) -> list[str]:
    """The words that the kubelet starts."""
    variables = environment(container, index)
    return [_expanded(text, variables) for text in container["command"] + container["args"]]


class Pod:
    """What the kubelet starts in one pod, but for the container. `work` stands for the directories /work and /tmp, and
    loopback addresses stand for those of pods. A controller adds the variables `extra`.
    """

    def __init__(self, container: dict[str, Any], index: int, work: Path, extra: dict[str, str]) -> None:
        words = [self._here(word, work) for word in command(container, index)]
        variables = {key: self._here(value, work) for key, value in (environment(container, index) | extra).items()}
        cwd = self._here(container.get("workingDir", "/work"), work)
        python = work / "bin" / "python"  # in an image, the one with esmshard; here it forks the ranks of torchrun
        python.parent.mkdir(exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parents[1] / "command.py"} "$@"\n')
        python.chmod(0o755)
        path = f"{python.parent}:{os.environ['PATH']}"
        self._file = work / f"pod-{index}.log"
        with self._file.open("wb") as file:
            self.process = subprocess.Popen(
                words, cwd=cwd, env={**os.environ, "PATH": path, **variables}, stdout=file, stderr=subprocess.STDOUT
            )

    @staticmethod
    def _here(text: str, work: Path) -> str:
        text = text.replace("tiny-0.tiny.default.svc", "127.0.0.1").replace("10.0.0.", "127.0.0.")
        return re.sub("^(out=|--chdir=)?/(work|tmp)", lambda found: f"{found[1] or ''}{work}", text)

    def end(self) -> int:
        try:
            return self.process.wait(600)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # the wrapper ends what it has started
            return self.process.wait(600)

    @property
    def output(self) -> str:
        return self._file.read_text(errors="replace")
