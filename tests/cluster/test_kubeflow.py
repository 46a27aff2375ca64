"""A TrainJob of Kubeflow Trainer: against the schema of its CustomResourceDefinition, and executed."""

import json
import re
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml as pyyaml

from esmshard.cluster.scripts import kubernetes
from esmshard.cluster.scripts.kubernetes import GRACE, render
from esmshard.cluster.scripts.scheduler_job import SchedulerJob
from esmshard.cluster.scripts.site import Site
from esmshard.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
import pods

SCHEMA = json.loads(Path(__file__).with_name("trainjob_schema.json").read_text())
RUNTIME = Path(__file__).parents[2] / "deploy" / "kubernetes" / "runtime.yaml"
VERSION = "1.31"


def _with_trainer(profile: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return profile | {"kubernetes": profile["kubernetes"] | {"trainer": "torch-distributed"} | changes}


BARE, FULL = _with_trainer(pods.BARE), _with_trainer(pods.FULL, secret=None)
TWO = pods.run(min_nodes=2)
ALONE = {"nodes": 1, "min_nodes": 1, "gpus_per_node": 1, "nproc": 1}
DOCTOR = {"name": "doctor", "kind": "doctor", "arguments": ("doctor",), "min_nodes": 2}
OWN = pods.run(min_nodes=2, arguments=("finetune", "/work/my.yaml"), recipe_text="task: {name: mlm}\n")
VARIANTS = {
    "two nodes": (TWO, BARE),
    "two nodes, everything": (TWO, FULL),
    "one node": (pods.run(**ALONE), BARE),
    "on CPUs": (pods.run(**ALONE | {"gpus_per_node": 0}), BARE),
    "a recipe of one's own": (OWN, BARE),
    "doctor": (pods.run(**DOCTOR), BARE),
}


def _pod_patch(job: dict[str, Any]) -> dict[str, Any]:
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    template: dict[str, Any] = replicated["template"]["spec"]["template"]
    return template


@pytest.fixture(scope="module")
def jsonschema() -> ModuleType:
    """The module, whose import takes 4 s and which only some tests need."""
    return import_module("jsonschema")


@pytest.fixture(scope="module")
def kubernetes_validate() -> ModuleType:
    """The module, which imports the other one."""
    return import_module("kubernetes_validate")


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_are_valid(jsonschema: ModuleType, kubernetes_validate: ModuleType, variant: str) -> None:
    for kind, document in pods.objects(*VARIANTS[variant]).items():
        if kind == "TrainJob":
            jsonschema.validate(document, SCHEMA)
            assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        else:
            assert kubernetes_validate.validate(document, VERSION, strict=True) == VERSION


@pytest.mark.parametrize(
    "keys",
    [("trainer", "numNode"), ("trainer", "resourcesPerNode", "limit"), ("podTemplateOverrides",), ("runtimeref",)],
)
def test_the_schema_finds_unknown_keys(jsonschema: ModuleType, keys: tuple[str, ...]) -> None:
    job = pods.objects(*VARIANTS["two nodes"])["TrainJob"]
    place = job["spec"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)


def test_the_schema_finds_mistakes_in_the_patch_of_the_pods(jsonschema: ModuleType) -> None:
    job = pods.objects(*VARIANTS["two nodes"])["TrainJob"]
    _pod_patch(job)["spec"]["containers"][0]["workingDir"] = "/work"
    with pytest.raises(jsonschema.ValidationError, match="workingDir"):
        jsonschema.validate(job, SCHEMA)


@pytest.mark.parametrize(
    ("variant", "kinds"),
    [
        ("two nodes", ["NetworkPolicy", "TrainJob"]),  # Trainer makes the Service
        ("a recipe of one's own", ["ConfigMap", "NetworkPolicy", "TrainJob"]),
        ("one node", ["TrainJob"]),
        ("doctor", ["NetworkPolicy", "TrainJob"]),
    ],
)
def test_only_what_is_needed_comes_before_the_job(variant: str, kinds: list[str]) -> None:
    assert list(pods.objects(*VARIANTS[variant])) == kinds


@pytest.mark.parametrize(
    ("variant", "nodes", "nproc", "command"),
    [
        (
            "two nodes",
            *(2, 8, "/work/runs/contact/status.json python -m torch.distributed.run -m esmshard finetune contact "),
        ),
        ("doctor", 2, 8, " python -m torch.distributed.run -m esmshard doctor"),
        ("one node", 1, 1, "/work/runs/contact/status.json python -m torch.distributed.run -m esmshard finetune "),
    ],
)
def test_torchrun_is_started_without_options_in_the_working_directory(
    variant: str, nodes: int, nproc: int, command: str
) -> None:
    trainer = pods.objects(*VARIANTS[variant])["TrainJob"]["spec"]["trainer"]
    words = pods.command(trainer, 1)
    wrapper = Path(kubernetes.__file__).with_name("torchrun_wrapper.sh").read_text(encoding="utf-8")
    assert words[:6] == ["env", "--chdir=/work", "sh", "-c", wrapper, "torchrun_wrapper.sh"]
    assert " ".join(words[6:]).startswith(command)
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (nodes, nproc)
    assert not [name for name in pods.environment(trainer, 0) if name.startswith("PET_")]  # Trainer refuses these


def test_every_key_of_the_profile() -> None:
    found = pods.objects(*VARIANTS["two nodes, everything"])
    job, policy = found["TrainJob"], found["NetworkPolicy"]
    trainer, template = job["spec"]["trainer"], _pod_patch(job)
    patch = template["spec"]
    (container,) = patch["containers"]
    labels = {"kueue.x-k8s.io/queue-name": "team-a"}
    labels |= {"app.kubernetes.io/name": "esmshard", "app.kubernetes.io/component": "finetune"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert job["metadata"]["labels"] == template["metadata"]["labels"] == labels
    assert job["metadata"]["namespace"] == policy["metadata"]["namespace"] == "protein-models"
    assert trainer["image"] == "registry.example.org:5000/team/esmshard:1.2"
    assert trainer["command"][:2] == ["env", "--chdir=/mnt/team"]
    assert trainer["resourcesPerNode"] == {
        "limits": {"cpu": "7500m", "memory": "512Gi", "rdma/hca": "1", "amd.com/gpu": "8"}
    }
    assert patch["imagePullSecrets"] == [{"name": "registry"}]
    assert patch["nodeSelector"] == {"zone": "on"}
    assert patch["tolerations"] == [
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    ]
    assert patch["terminationGracePeriodSeconds"] == GRACE
    assert patch["securityContext"]["runAsUser"] == 4321
    assert container["name"] == "node"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/mnt/team", "/tmp", "/dev/shm"}
    assert {"name": "work", "persistentVolumeClaim": {"claimName": "team-data"}} in patch["volumes"]
    assert pods.environment(trainer, 0)["NCCL_SOCKET_IFNAME"] == "ib0"
    assert policy["spec"]["podSelector"] == {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "contact"}}


def test_the_job_id_is_that_of_the_job_for_all_its_pods() -> None:
    trainer = pods.objects(*VARIANTS["two nodes"])["TrainJob"]["spec"]["trainer"]
    assert [pods.environment(trainer, index)["ESMSHARD_JOB_ID"] for index in (0, 1)] == ["contact-1e2d-88"] * 2


def test_a_recipe_of_ones_own_lies_where_the_command_looks() -> None:
    job = pods.objects(*VARIANTS["a recipe of one's own"])["TrainJob"]
    patch, words = _pod_patch(job)["spec"], job["spec"]["trainer"]["args"]
    (mount,) = [mount for mount in patch["containers"][0]["volumeMounts"] if mount["name"] == "recipe"]
    assert mount["mountPath"] == words[words.index("finetune") + 1] == "/work/my.yaml"
    assert {"name": "recipe", "configMap": {"name": job["metadata"]["name"]}} in patch["volumes"]


def test_names_leave_room_for_those_of_the_pods() -> None:
    """JobSet refuses names of pods with more than 63 characters: NAME-node-0-INDEX-RANDOM."""
    job = pods.objects(pods.run(name="a" * 80, nodes=100, min_nodes=100), BARE)["TrainJob"]
    name = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-99-abcde") == 63


def test_embed_stays_an_indexed_job() -> None:
    job = SchedulerJob(
        name="e", kind="embed", arguments=("embed", "starter", "in.fasta", "-o", "emb"), out="/work/emb", array=2
    )
    assert list(pods.objects(job, BARE)) == ["Job"]


@pytest.mark.parametrize(
    ("site", "job", "sentence"),
    [
        (BARE, pods.run(), "--nodes 1:2: a TrainJob runs on a fixed number of nodes; pass --nodes 2, or remove"),
        (_with_trainer(pods.FULL), TWO, "kubernetes.secret is tracker-keys, and a TrainJob cannot take all keys"),
    ],
)
def test_what_cannot_be_rendered_is_one_sentence(site: dict[str, Any], job: SchedulerJob, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        render(job, Site.model_validate(site))
    (problem,) = error.value.problems
    assert problem.startswith(sentence)


def test_the_runtime_treats_pods_as_the_indexed_job_does(kubernetes_validate: ModuleType) -> None:
    """But for exit code 2, which torchrun never returns."""
    runtime = pyyaml.safe_load(RUNTIME.read_text(encoding="utf-8"))
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": spec}
    assert kubernetes_validate.validate(job, VERSION, strict=True) == VERSION
    indexed = pods.objects(TWO, pods.BARE)["Job"]["spec"]
    for key in ("completionMode", "backoffLimit", "podReplacementPolicy", "successPolicy"):
        assert spec[key] == indexed[key]
    assert spec["podFailurePolicy"]["rules"] == indexed["podFailurePolicy"]["rules"][1:]
    (container,) = spec["template"]["spec"].pop("containers")
    assert container["name"] == replicated["name"] == "node"
    assert spec["template"]["spec"].items() <= indexed["template"]["spec"].items()


def test_two_pods_train(tiny_recipe: Path) -> None:
    """With the variables that Trainer gives to them."""
    work = tiny_recipe.parent
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = pods.run(
        arguments=("finetune", "/work/own.yaml", "train.steps=3", "--resume", "auto", "--no-report"),
        recipe_text=tiny_recipe.read_text(),
        min_nodes=2,
        gpus_per_node=0,
        nproc=1,
        out="/work/run",
    )
    found = pods.objects(job, BARE | {"exports": {"OMP_NUM_THREADS": "1"}})
    (work / "own.yaml").write_text(found["ConfigMap"]["data"]["recipe.yaml"])
    trainer = found["TrainJob"]["spec"]["trainer"]
    of_trainer = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }
    started = [
        pods.Pod(trainer, index, work, of_trainer | {"PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)})
        for index in (0, 1)
    ]
    assert [pod.end() for pod in started] == [0, 0], [pod.output for pod in started]
    status = json.loads((work / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["job"]) == ("done", 3, "contact-1e2d-88")
