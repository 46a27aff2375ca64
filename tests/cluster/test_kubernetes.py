"""What is rendered for Kubernetes: against the schemas of its API, against what it says of its objects, and executed.

The examples in deploy/kubernetes are what the commands in their site.yaml print; `python
tests/cluster/test_kubernetes.py` runs these, and writes the examples anew.
"""

import json
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml as pyyaml  # an independent parser; and of YAML 1.1, as is kubectl's
from held_runs import Hold
from ruamel.yaml import YAML
from typer.testing import CliRunner

from esmshard.cli.app import app
from esmshard.cluster.launch import GRACE, TEMPLATES, Job, render
from esmshard.cluster.site import KubernetesSite, Site
from esmshard.errors import UsageError
from esmshard.parallel.launch import END_TIMEOUT, STOP_TIMEOUT
from esmshard.recipe import recipe_file as recipe
from esmshard.train import run_dir

sys.path.insert(0, str(Path(__file__).parent))
import pods

EXAMPLES = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.31"
OWN = "task: {name: mlm}\n\n# a comment\ndata: {train: 'a b.fasta'}  # $(HOME)\nout: runs/é\n"


ALONE = {"nodes": 1, "min_nodes": 1, "gpus_per_node": 1, "nproc": 1}
WORDS = ("embed", "esm2_t33_650M_UR50D", "proteins.fasta.gz", "-o", "embeddings", "--engine", "array")
EMBED = ALONE | {"name": "embed", "kind": "embed", "arguments": WORDS, "out": "embeddings", "array": 4}
DOCTOR = {"name": "doctor", "kind": "doctor", "arguments": ("doctor",), "min_nodes": 2}
VARIANTS = {
    "two nodes": (pods.run(), pods.BARE),
    "two nodes, everything": (pods.run(), pods.FULL),
    "two nodes, an odd directory": (pods.run(out="/mnt/team/$(id): a #1"), pods.FULL),
    "one node": (pods.run(**ALONE), pods.BARE),
    "on CPUs": (pods.run(**ALONE | {"gpus_per_node": 0}), pods.BARE),
    "a recipe of one's own": (pods.run(arguments=("finetune", "/work/my own.yaml"), recipe_text=OWN), pods.BARE),
    "embed": (Job(**EMBED), pods.BARE),
    "embed, everything": (Job(**EMBED), pods.FULL),
    "doctor": (pods.run(**DOCTOR), pods.FULL),
    "doctor, one node": (pods.run(**DOCTOR | ALONE), pods.BARE),
}


def _examples() -> dict[str, str]:
    """What the commands in the profile's comment print, by the name of the file that they are redirected to."""
    lines = (EXAMPLES / "site.yaml").read_text(encoding="utf-8").splitlines()
    commands = [line.removeprefix("#").split() for line in lines if line.startswith("#   esmshard launch")]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESMSHARD_SITE", str(EXAMPLES / "site.yaml"))
        for _, *arguments, redirection, file in commands:
            assert redirection == ">"
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
            found[file] = done.stdout
    return found


def _action(job: dict[str, Any], exit_code: int, disrupted: bool = False) -> str:
    """What the Job controller does about a failed pod: the first rule that holds, or Count."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if codes is not None and codes["operator"] == "In" and exit_code in codes["values"]:
            return str(rule["action"])
        if conditions is not None and disrupted and conditions == [{"type": "DisruptionTarget", "status": "True"}]:
            return str(rule["action"])
    return "Count"


@pytest.fixture(scope="module")
def kubernetes_validate() -> ModuleType:
    """The module, whose import takes 4 s and which only some tests need."""
    return import_module("kubernetes_validate")


def test_objects_are_valid(kubernetes_validate: ModuleType) -> None:
    for variant in VARIANTS.values():
        for document in pods.objects(*variant).values():
            assert kubernetes_validate.validate(document, VERSION, strict=True) == VERSION


def test_commands() -> None:
    for variant, command in (
        (
            "two nodes",
            "torchrun_wrapper.sh /work/runs/contact/status.json python -m torch.distributed.run --nnodes=1:2 "
            "--nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d "
            "--rdzv-endpoint=contact-0.contact.default.svc:29400 --rdzv-id=contact --local-addr=10.0.0.2 "
            "-m esmshard finetune contact optim.lr=1e-4 --resume auto out=/work/runs/contact",
        ),
        ("one node", "esmshard finetune contact optim.lr=1e-4 --resume auto --nproc=1 --max-restarts=3"),
        (
            "embed",
            "esmshard embed esm2_t33_650M_UR50D proteins.fasta.gz -o embeddings --engine array --nproc=1 --worker=1/4",
        ),
    ):
        words = pods.command(pods.objects(*VARIANTS[variant])["Job"]["spec"]["template"]["spec"]["containers"][0], 1)
        if words[0] == "sh":
            wrapper = (TEMPLATES / "torchrun_wrapper.sh").read_text(encoding="utf-8")
            assert words[:3] == ["sh", "-c", wrapper]
            words = words[3:]
        assert words == command.split(" ")
    # An odd directory is the same for the run and the wrapper.
    job, out = pods.objects(*VARIANTS["two nodes, an odd directory"])["Job"], "/mnt/team/$(id): a #1"
    words = pods.command(job["spec"]["template"]["spec"]["containers"][0], 0)
    assert words[4] == f"{out}/status.json"
    assert recipe.load(recipe.resolve("contact"), [words[-1]]).out == out


def test_how_pods_are_replaced() -> None:
    for kind, profile in VARIANTS.values():
        job = pods.objects(kind, profile)["Job"]
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        assert pod["restartPolicy"] == "Never"  # which podFailurePolicy demands
        assert (spec["completionMode"], spec["podReplacementPolicy"]) == ("Indexed", "Failed")
        assert spec["completions"] == spec["parallelism"]
        assert "activeDeadlineSeconds" not in spec
        codes = {75: "Ignore", 143: "Ignore", 2: "FailJob", 1: "Count", 137: "Count"}
        assert {code: _action(job, code) for code in codes} == codes
        disrupted = {75: "Ignore", 2: "FailJob", 1: "Ignore", 137: "Ignore"}
        assert {code: _action(job, code, disrupted=True) for code in disrupted} == disrupted
        assert pod["terminationGracePeriodSeconds"] == GRACE >= STOP_TIMEOUT + END_TIMEOUT
        assert spec["backoffLimit"] == (0 if job["metadata"]["name"] == "doctor" else 3 * spec["completions"])
        # Of the pods of a run the first that is done says that all are; each worker of embed has its own parts.
        done = {"rules": [{"succeededCount": 1}]} if kind.kind == "finetune" else None
        assert spec.get("successPolicy") == (done if spec["completions"] > 1 else None)


def test_pods_may_do_nothing_but_work() -> None:
    """The Pod Security Standard `restricted`, except RDMA's capability; files only on the volumes; a closed network."""
    for variant, profile in VARIANTS.values():
        documents, everything = pods.objects(variant, profile), profile is pods.FULL
        pod = documents["Job"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        security = pod["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 4321 if everything else 1000)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        capabilities = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if everything else {})
        allowed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}
        assert container["securityContext"] == allowed
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/mnt/team" if everything else "/work", "/tmp", "/dev/shm"}
    documents = pods.objects(*VARIANTS["doctor"])
    name = documents["Job"]["metadata"]["name"]
    same = {"podSelector": {"matchLabels": {"batch.kubernetes.io/job-name": name}}}
    policy = {**same, "policyTypes": ["Ingress"], "ingress": [{"from": [same]}]}
    assert documents["NetworkPolicy"]["spec"] == policy


def test_every_key_of_the_profile_has_an_effect() -> None:
    whole = render(pods.run(), Site.model_validate(pods.FULL), "kubernetes")
    for key in KubernetesSite.model_fields:
        kept = {name: value for name, value in pods.FULL["kubernetes"].items() if name != key or name == "claim"}
        kept |= {"claim": "other"} if key == "claim" else {}
        assert render(pods.run(), Site.model_validate(pods.FULL | {"kubernetes": kept}), "kubernetes") != whole, key
    job = pods.objects(*VARIANTS["two nodes, everything"])["Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"cpu": "96", "memory": "512Gi", "rdma/hca": "1", "amd.com/gpu": "8"}}
    environment = pods.environment(container, 0)
    assert (environment["NCCL_SOCKET_IFNAME"], environment["ESMSHARD_CACHE"]) == ("ib0", "/work/cache")
    assert len({variable["name"] for variable in container["env"]}) == len(container["env"])


def test_the_job_id_is_that_of_the_job_for_all_its_pods() -> None:
    for profile, job_id in ((pods.BARE, "contact-0f5c-77"), (pods.BARE | {"exports": {"ESMSHARD_JOB_ID": "x"}}, "x")):
        (container,) = pods.objects(pods.run(), profile)["Job"]["spec"]["template"]["spec"]["containers"]
        assert [run_dir.job_id(pods.environment(container, index)) for index in (0, 1)] == [job_id] * 2


NASTY = [
    *("x; rm -rf /", "$(touch /tmp/pwned)", "$(HOME)", "$$(HOME)", "cost=5$", "$HOME `id`", "$$$", "$é", "$(open"),
    *("two\nlines\n", "a: b # c\n---\nkind: Secret\n", "- x\n  - y \n\ttab\r\n", "yes", "null", "", "1e3", "12:30:45"),
    *("!!python/object:os.system", "{a: [1]}", "'\"\\", "蛋白质 🧬 é", "\u2028\x85\ufeff\x07", "%" + "long " * 400),
    *("=", "trailing \nblanks \n", "a form feed\x0c\n"),
]


def test_every_value_arrives_as_it_is() -> None:
    for text in NASTY:
        job = pods.run(arguments=("finetune", "/work/my.yaml", f"out={text}", text), recipe_text=text)
        rendered = render(job, Site.model_validate(pods.BARE | {"exports": {"PLAIN": text}}), "kubernetes")
        for documents in (list(pyyaml.safe_load_all(rendered)), list(YAML(typ="safe", pure=True).load_all(rendered))):
            config, _, _, rendered_job = [document for document in documents if document]
            (container,) = rendered_job["spec"]["template"]["spec"]["containers"]
            words = pods.command(container, 0)
            assert words[words.index("esmshard") + 1 :][:4] == ["finetune", "/work/my.yaml", f"out={text}", text]
            assert pods.environment(container, 0)["PLAIN"] == text
            assert config["data"]["recipe.yaml"] == text


def test_names() -> None:
    for text, nodes, name in (
        ("Contact, LR=1e-4 (second try)", 2, "contact-lr-1e-4-second-try"),
        ("650M", 2, "esmshard-650m"),
        ("***", 1, "esmshard"),
        ("a" * 70, 10, "a" * 61),
        ("a" * 70, 11, "a" * 60),
    ):
        job = pods.objects(pods.run(name=text, nodes=nodes), pods.BARE)["Job"]
        assert job["metadata"]["name"] == name
        assert len(f"{name}-{nodes - 1}") <= 63


def test_what_cannot_be_rendered() -> None:
    odd = pods.run(arguments=("finetune", "contact", "out=\udcff"))
    for site, job, token in (
        ({"kubernetes": {"claim": "data"}}, pods.run(), "container.image"),
        (pods.BARE | {"container": {"image": "/images/esmshard.sqsh"}}, pods.run(), "in a registry"),
        ({"container": {"image": "esmshard"}}, pods.run(), "kubernetes.claim"),
        (pods.BARE, odd, "contains a character"),
    ):
        with pytest.raises(UsageError, match=token):
            render(job, Site.model_validate(site), "kubernetes")


def test_examples_are_what_is_rendered(kubernetes_validate: ModuleType) -> None:
    examples = _examples()
    assert {path.name for path in EXAMPLES.iterdir()} == {*examples, "site.yaml", "claim.yaml", "embed-rayjob.yaml"}
    for name, text in examples.items():
        assert (EXAMPLES / name).read_text(encoding="utf-8") == text, f"run: python {Path(__file__).name}"
    claim = YAML(typ="safe").load((EXAMPLES / "claim.yaml").read_text())
    assert kubernetes_validate.validate(claim, VERSION, strict=True) == VERSION
    cluster = pyyaml.safe_load((EXAMPLES / "embed-rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        assert kubernetes_validate.validate(pod, VERSION, strict=True) == VERSION
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"][:1]]
        assert claims == [claim["metadata"]["name"]]


def _tiny(recipe_file: Path) -> dict[str, Any]:
    """The job of a run on two nodes, whose first pod listens at a port that is free here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ("finetune", "/work/own.yaml", "train.steps=40", "train.eval_every=40", "checkpoint.every=40")
    settings: dict[str, Any] = {"min_nodes": 2, "gpus_per_node": 0, "nproc": 1, "out": "/work/run", "name": "tiny"}
    job = pods.run(
        arguments=(*words, "--resume", "auto", "--no-report"), recipe_text=recipe_file.read_text(), **settings
    )
    profile = {"exports": {"OMP_NUM_THREADS": "1"}, "kubernetes": {"claim": "data", "port": port}}
    found = pods.objects(job, pods.BARE | profile)
    (recipe_file.parent / "own.yaml").write_text(found["ConfigMap"]["data"]["recipe.yaml"])
    job_object: dict[str, Any] = found["Job"]
    return job_object


@pytest.mark.slow
def test_two_pods_train_and_are_preempted(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How such a run goes on is the same under Slurm, in test_slurm_run.py."""
    work = tiny_recipe.parent
    held = Hold(work / "hold", 1)
    monkeypatch.setenv("PYTHONPATH", held.environment["PYTHONPATH"])
    job = _tiny(tiny_recipe)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    started = [pods.Pod(container, index, work, {"JOB_COMPLETION_INDEX": str(index)}) for index in (1, 0)]
    held.wait(lambda: any(pod.process.poll() is not None for pod in started))
    started[0].process.terminate()
    held.go_when_asked(lambda: any(pod.process.poll() is not None for pod in started))
    codes = [pod.end() for pod in started]
    assert codes == [75, 75], [pod.output for pod in started]
    assert [_action(job, code) for code in codes] == ["Ignore", "Ignore"]
    status = json.loads((work / "run" / "status.json").read_text())
    assert (status["state"], status["job"]) == ("preempted", "tiny-0f5c-77")
    assert 0 < status["step"] < 40


if __name__ == "__main__":
    for file, rendered in _examples().items():
        (EXAMPLES / file).write_text(rendered, encoding="utf-8")
