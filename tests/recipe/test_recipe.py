"""Recipes: what is read, what is refused and where the message points, and what paths mean."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from command import esmshard
from pydantic import ValidationError
from ruamel.yaml import YAML

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import shipped
from esmshard.io.remote import data_file
from esmshard.recipe import recipe_file
from esmshard.recipe.recipe_file import differences, dump, load, resolve, schema
from esmshard.recipe.sections import Recipe, TrainSettings
from esmshard.tasks.contact import ContactSettings
from esmshard.tasks.registry import registered

TEXT = """\
# the line numbers below count from this comment
task: {name: contact, blocks: 2}
model: {name: mini}
data:
  train: train.fasta
  valid: sample:contact/valid
  test: /data/test.fasta
optim:
  lr: 1e-4
  clip: 2
train: {steps: 40, seed: 7}
out: runs/x
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe, in another directory than the working directory."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = tmp_path / "recipes" / "mine.yaml"
    file.write_text(TEXT)
    return file


def edit(path: Path, *changes: tuple[str, str]) -> None:
    """Change texts of the recipe; an empty text stands for its end."""
    text = path.read_text()
    for old, new in changes:
        assert not old or text.count(old) == 1
        text = text.replace(old, new) if old else text + new
    path.write_text(text)


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as error:
        load(path, overrides)
    assert str(error.value) == "\n".join(error.value.problems)
    return list(error.value.problems)


def problem(path: Path, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1
    return found[0]


def test_recipes_are_shipped() -> None:
    files = {p.name for p in shipped("recipes").iterdir()}
    assert files == {f"{name}.yaml" for name in recipe_file.names()} | {"schema.json"}
    assert recipe_file.names() == sorted(recipe_file.names())
    tasks = {"contact", "mlm", "pair", "residue", "sequence", "variant"}
    assert {load(resolve(name)).task.name for name in recipe_file.names()} == tasks


@pytest.mark.parametrize("name", recipe_file.names())
def test_a_shipped_recipe_loads_anywhere(name: str, path: Path) -> None:
    recipe, written = load(resolve(name)), YAML(typ="safe").load(resolve(name).read_text())
    loaded = recipe.model_dump(mode="json")
    assert recipe.out == str(path.parent.parent / "work" / written.pop("out"))
    assert len(written) > 2
    keys = ("train", "valid", "test", "labels", "mask", "clusters", "table", "wild_type")
    files = [getattr(recipe.data, key) for key in keys]
    shipped = [file for file in files if file is not None and file.startswith("sample:")]
    assert len(shipped) in ((0, 2) if recipe.task.name == "variant" else (0, 3, 4))
    assert all(data_file(file).is_file() for file in shipped)
    for key in keys:  # a recipe to be copied names files of its user's
        if not str(written["data"].get(key, "sample:")).startswith("sample:"):
            assert loaded["data"].pop(key) == str(resolve(name).parent / written["data"].pop(key))
    for section, value in written.items():
        assert ({key: loaded[section][key] for key in value} if isinstance(value, dict) else loaded[section]) == value


def test_a_copy_names_the_installed_schema(path: Path) -> None:
    lines = recipe_file.copy_of(resolve("contact")).splitlines()
    assert lines[0] == f"# yaml-language-server: $schema={shipped('recipes') / 'schema.json'}"
    assert Path(lines[0].partition("=")[2]).is_file()
    assert lines[1:] == resolve("contact").read_text().splitlines()[1:]
    assert recipe_file.copy_of(path) == TEXT  # one without that line stays as it is


def test_the_shipped_schema_is_that_of_the_settings() -> None:
    written = (shipped("recipes") / "schema.json").read_text()
    assert written == json.dumps(schema(), indent=1) + "\n", "esmshard recipes schema > recipes/schema.json"


def test_values_are_those_written_and_others_the_defaults(path: Path) -> None:
    recipe = load(path)
    assert (recipe.optim.lr, recipe.optim.clip, type(recipe.optim.clip)) == (1e-4, 2.0, float)
    assert recipe.task == ContactSettings(name="contact", head="pairwise", channels=32, blocks=2)
    assert (recipe.train.steps, recipe.train.seed, recipe.train.eval_every) == (40, 7, 50)
    assert (recipe.optim.head_lr, recipe.optim.betas, recipe.init) == (2e-4, (0.9, 0.98), "pretrained")
    assert recipe.batch.tokens_per_rank == "auto"


CONTACT, TRAIN = "{name: contact, blocks: 2}", "{steps: 40, seed: 7}"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps: 40", "steps: many", "11:16: train.steps: Input should be a valid integer"),
        ("steps: 40", "steps: '40'", "11:16: train.steps: Input should be a valid integer"),
        ("steps: 40", "steps: 0", "11:16: train.steps: Input should be greater than or equal to 1"),
        ("lr: 1e-4", "lr: .nan", "9:7: optim.lr: Input should be a finite number"),
        ("name: mini", "name: 3", "3:15: model.name: Input should be a valid string"),
        ("clip: 2", "betas: [0.9]", "10:3: optim.betas.1: Field required"),
        ("clip: 2", "betas: 0.9", "10:10: optim.betas: Input should be a valid tuple"),
        ("clip: 2", "betas: [0.5, 7]", "10:16: optim.betas.1: Input should be less than 1"),
        (TRAIN, "3", "11:8: train: Input should be a valid dictionary"),
        ("out: runs/x\n", "", "1:1: out: Field required"),
        ("  train: train.fasta\n", "", "4:1: data.train: this key is required"),
        ("  clip: 2", "  lr: 2", "10:3: not YAML: found duplicate key"),
        (TEXT, "a: [1\nb: 2\n", "2:2: not YAML: "),
        (TEXT, "a: 1\n---\nb: 2\n", "2:1: not YAML: "),
        (TEXT, "- a\n", "1:1: a recipe is a YAML mapping with the keys task, model, "),
        # What a tag or an impossible date does is refused as what it is.
        (TEXT, "out: 2020-13-40", "month must be"),
        (TEXT, "train: {steps: !!int many}", "invalid literal"),
        (TEXT, "out: !!omap x", "a tag does not fit"),
        # The keys of a task are checked by its name.
        (CONTACT, "{name: contct}", "2:7: task: Input tag 'contct' found using 'name' does not match any"),
        (CONTACT, "{blocks: 2}", "2:7: task: Unable to extract tag using discriminator 'name'"),
        (CONTACT, "{name: contact, blockz: 2}", "2:23: task.blockz: unknown key; did you mean 'blocks'?"),
        (CONTACT, "{name: mlm, mask: 0.9}", "2:25: task.mask: Input should be less than or equal to 0.5"),
        (CONTACT, "{name: residue, classes: [H, 3]}", "2:36: task.classes.1: Input should be a valid string"),
        # What a method of adaptation does not read.
        ("", "adapt: {rank: 8}", "13:15: adapt.rank: is for adapt.method lora, and the recipe has full; remove it, or"),
        ("", "adapt: {method: head, freeze: [norms]}", "13:31: adapt.freeze: is for adapt.method full, and the recipe"),
        ("", "adapt: {method: lora, targets: []}", "13:32: adapt.targets: names no layer; name some, or set adapt.me"),
        ("", "adapt: {method: lora, targets: [q, k, q]}", "13:32: adapt.targets: has a name twice (q, k, q); write"),
    ],
)
def test_a_mistake_is_refused_at_its_place(path: Path, old: str, new: str, expected: str) -> None:
    edit(path, (old, new))
    (found,) = problem(path).splitlines()
    assert found.startswith(f"{path}:{expected}") or (not expected[0].isdigit() and expected in found)


def test_what_cannot_be_read_is_refused(path: Path) -> None:
    path.write_bytes(b"out: \xff\xfe\n")
    assert problem(path).startswith(f"{path}:")
    path.write_text("# nothing\n")
    assert problems(path) == [f"{path}:1:1: {key}: Field required" for key in ("task", "model", "data", "out")]
    path.unlink()
    for place in (path, path.parent):
        assert problem(place).startswith(f"{place}: cannot be read: ")


def test_all_problems_are_reported_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_UNSET", raising=False)
    edit(path, ("  lr:", "  lrr:"), ("steps: 40", "steps: many"), ("out:", "outt:"))
    edit(path, ("/data/test", "${SLURM_UNSET}/test"))
    assert sorted(problems(path, "train.sed=1", "nonsense")) == sorted(
        [
            f"{path}:9:3: optim.lrr: unknown key; did you mean 'lr'?",
            f"{path}:11:16: train.steps: Input should be a valid integer",
            f"{path}:12:1: outt: unknown key; did you mean 'out'?",
            f"{path}:1:1: out: Field required",
            f"{path}:7:9: data.test: the environment variable SLURM_UNSET is not set",
            "train.sed=1: train.sed: unknown key; did you mean 'seed'?",
            "nonsense: an override is KEY=VALUE, such as optim.lr=1e-4",
        ]
    )


def test_overrides_change_values_and_make_sections(path: Path) -> None:
    recipe = load(path, ["optim.lr=3e-5", "train.steps = 9", "batch.global_tokens=64", "optim.schedule=linear"])
    assert (recipe.optim.lr, recipe.train.steps, recipe.train.seed) == (3e-5, 9, 7)
    assert (recipe.batch.global_tokens, recipe.optim.schedule) == (64, "linear")
    assert load(path, ["optim.lr=1", "optim.lr=2", "optim.betas=[0.8, 0.9]"]).optim.betas == (0.8, 0.9)
    assert load(path, ["optim.lr=1", "optim.lr=2"]).optim.lr == 2
    assert load(path, ["train={steps: 3}"]).train == TrainSettings(steps=3)
    assert load(path, ["task={name: mlm, mask: 0.3}"]).task.model_dump() == {"name": "mlm", "mask": 0.3}
    assert load(path, ["data.clusters=c.tsv"]).data.folds is None  # folds come from the command line


@pytest.mark.parametrize(
    ("old", "new", "overrides", "key", "expected"),
    [
        # Paths of the file are relative to it, those of an override and `out` to the working directory.
        ("", "", [], "data.train", "FILE/train.fasta"),
        ("", "", [], "data.valid", "sample:contact/valid"),
        ("", "", [], "data.test", "/data/test.fasta"),
        ("", "", [], "out", "WORK/runs/x"),
        ("", "", ["data.train=a/t.fasta"], "data.train", "WORK/a/t.fasta"),
        ("", "", ["data={train: a/t.fasta}"], "data.train", "WORK/a/t.fasta"),
        ("", "", ["data.valid=sample:contact/test"], "data.valid", "sample:contact/test"),
        ("", "", ["out=o"], "out", "WORK/o"),
        ("", "", ["out=/dev/shm/run"], "out", "/dev/shm/run"),  # shared memory is a place for a run
        ("train.fasta", "${SCRATCH}/${USER}/${USER}.fasta", [], "data.train", "/scratch/b/b.fasta"),
        ("runs/x", "${SCRATCH}/runs", [], "out", "/scratch/runs"),
        ("", "", ["data.valid=~/v/${USER}.fasta"], "data.valid", "/home/someone/v/b.fasta"),
        ("", "", ["out=/runs/${SLURM_JOB_ID}"], "out", "/runs/17"),
        # A variable that is not set does no harm where an override takes its place.
        ("sample:contact/valid", "${SLURM_UNSET}/x", ["data.valid=v.fasta"], "data.valid", "WORK/v.fasta"),
        # Files of labels, and a list of clusters.
        (CONTACT, "{name: residue}\n", ["data.labels=b.csv"], "data.labels", "WORK/b.csv"),
        (
            CONTACT,
            "{name: residue}\n",
            ["data.labels=sample:contact/labels.csv"],
            "data.labels",
            "sample:contact/labels.csv",
        ),
        (CONTACT, "{name: residue}\n", ["data.labels=null"], "data.labels", None),
        ("  train: train", "  clusters: ~/c.tsv\n  train: train", [], "data.clusters", "/home/someone/c.tsv"),
        ("  train: train", "  clusters: ../c.tsv\n  train: train", [], "data.clusters", "FILE/../c.tsv"),
        # A model is a name, or the name of a repository of the hub, unless a path has it.
        ("", "", [], "model.name", "mini"),
        ("name: mini", "name: beside", [], "model.name", "FILE/beside"),
        ("name: mini", "name: ../weights/esm.pt", [], "model.name", "FILE/../weights/esm.pt"),
        ("", "", ["model.name=../m.pt"], "model.name", "WORK/../m.pt"),
        ("", "", ["model.name=esm2_t6_8M_UR50D"], "model.name", "esm2_t6_8M_UR50D"),
        ("name: mini", "name: lab/other", [], "model.name", "lab/other"),
        ("name: mini", "name: lab/mine", [], "model.name", "FILE/lab/mine"),
        ("", "", ["model.name=facebook/esm2_t6_8M_UR50D"], "model.name", "facebook/esm2_t6_8M_UR50D"),
        ("", "", ["model.name=lab/w.pt"], "model.name", "WORK/lab/w.pt"),
        ("", "", ["data.train=lab/train"], "data.train", "WORK/lab/train"),
    ],
)
def test_paths_and_names(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    overrides: list[str],
    key: str,
    expected: str | None,
) -> None:
    for name, value in {"HOME": "/home/someone", "SCRATCH": "/scratch", "USER": "b", "SLURM_JOB_ID": "17"}.items():
        monkeypatch.setenv(name, value)
    for name in ("beside", "lab/mine"):
        (path.parent / name).mkdir(parents=True)
    edit(path, (old, new))
    found: Any = load(path, overrides)
    for part in key.split("."):
        found = getattr(found, part)
    places = {"FILE": str(path.parent), "WORK": str(Path.cwd())}
    start, slash, rest = (expected or "").partition("/")
    assert found == (os.path.normpath(places[start] + slash + rest) if start in places else expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.lr=1e-7", "optim.betas=[0.5, 0.75]", "batch.tokens_per_rank=99"],
        ["train.steps=null", "train.epochs=0.5"],
        ["data.folds=3", "data.fold=2"],
        ["data.fold=0"],
        *([f"adapt.method={method}"] for method in ("full", "lora", "head")),
        ["task={name: mlm, mask: 0.3}"],
        ["task={name: variant}", "data={table: v.csv, wild_type: wt.fasta}"],
    ],
)
def test_a_dumped_recipe_loads_as_itself(path: Path, overrides: list[str]) -> None:
    recipe = load(path, overrides)
    other = path.parent / "deeper" / "resolved.yaml"
    other.parent.mkdir()
    other.write_text(dump(recipe))
    assert load(other) == recipe == Recipe.model_validate(recipe.model_dump(mode="json"))
    assert type(load(other).task) is registered().settings[recipe.task.name]
    assert dump(load(other)) == dump(recipe)


def test_differences_name_the_keys_that_changed(path: Path) -> None:
    old = load(path)
    new = load(path, ["optim.lr=0.5", "train.steps=41", "data.train=sample:contact/train"])
    assert differences(old, old) == []
    assert differences(old, new) == [
        f"data.train (sample:contact/train, was {path.parent / 'train.fasta'})",
        "optim.lr (0.5, was 0.0001)",
        "train.steps (41, was 40)",
    ]


def test_a_recipe_is_found_by_path_and_by_name(path: Path) -> None:
    assert resolve(str(path)) == path
    assert resolve("contact") == shipped("recipes") / "contact.yaml"
    Path("contact").write_text(TEXT)
    assert resolve("contact") == Path("contact")  # a file comes first
    with pytest.raises(UsageError, match=r"^contct: neither a file nor .* \(contact, .*; did you mean 'contact'\?$"):
        resolve("contct")
    with pytest.raises(UsageError, match=r"^no.yaml: no such recipe file; `esmshard recipes cp contact my.yaml`"):
        resolve("no.yaml")


def test_a_sample_is_a_shipped_file_and_a_path_stays_a_path() -> None:
    assert data_file("sample:contact/train") == shipped("data") / "contact" / "train.fasta"
    assert data_file("sample:contact/train.npz") == shipped("data") / "contact" / "train.npz"
    assert data_file("/data/x.fasta") == Path("/data/x.fasta")


@pytest.mark.parametrize("name", ["sample:contact/trian", "sample:contact/../contact/train"])
def test_an_unknown_sample_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: no such sample; there are .*sample:variants/wild_type, sample:con"):
        data_file(name)


def test_the_schema_describes_every_key() -> None:
    tree = schema()
    described = []

    def walk(node: dict[str, Any], prefix: str) -> None:
        assert node["additionalProperties"] is False
        for name, field in node["properties"].items():
            sections = [
                tree["$defs"][one["$ref"].split("/")[-1]] for one in field.get("oneOf", [field]) if "$ref" in one
            ]
            texts = [field.get("description") or section.get("description", "") for section in sections or [field]]
            # A task's name is explained by its section.
            assert all(len(text) > 10 for text in texts) or "const" in field, prefix + name
            assert "default" in field or name in node["required"]
            described.append(prefix + name)
            for section in sections:
                walk(section, f"{prefix}{name}.")

    walk(tree, "")
    assert len(described) > 60
    assert math.isclose(tree["$defs"]["OptimSettings"]["properties"]["lr"]["default"], 2e-5)


VARIANT = ("task={name: variant}", "data={table: v.csv, wild_type: wt.fasta}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optim.lrr=1"], "optim.lrr: unknown key; did you mean 'lr'?"),
        (["train={stepz: 1}"], "train.stepz: unknown key; did you mean 'steps'?"),
        (["train.steps=x"], "train.steps: Input should be a valid integer"),
        (["optim.lr"], "an override is KEY=VALUE, such as optim.lr=1e-4"),
        (["optim.lr.x=1"], "lr has no keys of its own"),
        (["task.name=mlm"], "2:23: task.blocks: unknown key"),
        (["task={name: mlm, mask: x}"], "task.mask: Input should be a valid number"),
        # Keys that do not go together.
        (["train.steps=4", "train.epochs=2"], "train.epochs: is another way to say train.steps, which is 4; give one"),
        (["batch.sequences=8", "batch.global_tokens=99"], "batch.sequences: is another way"),
        (["data.fold=2"], "data.fold: is one of data.folds, and the recipe has none; add data.folds, or remove it"),
        (["data.folds=3", "data.fold=3"], "data.fold: is counted from 0, and of 3 folds the last one is 2, not 3"),
        (["data.labels=x.csv"], "data.labels: is for task pair, residue and sequence, and the recipe has contact"),
        (["task={name: sequence}", "data.mask=x"], "data.mask: is for task residue, and the recipe has sequence; rem"),
        (["task={name: sequence}", "data.long=crop"], "data.long: crop may remove the cause of the label of a protein"),
        (["task={name: mlm}", "adapt.method=probe"], "adapt.method: probe is not offered by task mlm"),
        (["model.quantize=nf4", "adapt.method=full"], "adapt.method: full trains the weights that model.quantize=nf4"),
        (
            ["model.quantize=int8", "adapt.method=lora", "parallel.compile=true"],
            "parallel.compile: cannot compile the unpacking of model.quantize; pass parallel.compile=false",
        ),
        ([*VARIANT, "data.train=x"], "data.train: is for the other tasks, and the recipe has variant, which divides"),
        ([*VARIANT, "data.long=skip"], "data.long: skip leaves variants out; choose full, or window for a part of a"),
        ([*VARIANT, "data.train_max=2"], "data.train_max: is for data.split mutations, and the recipe has position"),
        ([*VARIANT, "data.split=given", "data.folds=5"], "data.folds: divides the table, and data.split given does so"),
        ([*VARIANT, "data.target=[y]", "data.lower_is_better=[kd]"], "data.lower_is_better: kd is no target; data.tar"),
        ([*VARIANT, "task.loss=ranking", "data.transform=log"], "data.transform: log has no effect on task.loss rank"),
        ([*VARIANT, "adapt.method=probe"], "adapt.method: probe fits a linear head; set task.hidden: 0"),
        (
            ["data.folds=3"],
            "data.folds: makes 3 parts, and a run is tested on one of them; to train all 3 runs, remove",
        ),
        # Parts of the model that cannot be frozen.
        *(
            ([f"adapt.freeze=[norms, {part}]"], f"adapt.freeze: '{part}' is no part of the model; name embedding, nor")
            for part in ("layers", "layers.", "layers.a", "layers.-1", "layers.1-", "layers.0-1-2", "norm", "head")
        ),
        (["adapt.freeze=[layers.3-1]"], "adapt.freeze: 'layers.3-1' ends before it begins; write the first layer"),
        # Numbers and places that no run has.
        *(
            ([f"{key}={value}"], f"{key}: Input should be {bound}")
            for key, value, bound in (
                ("train.steps", "99999999999", "less than or equal to 100000000"),
                ("train.epochs", "1e9", "less than or equal to 1000000"),
                ("train.seed", "99999999999", "less than 4294967296"),
                ("train.eval_every", "99999999999", "less than or equal to 100000000"),
                ("optim.lr", "65536", "less than or equal to 10"),
                ("optim.head_lr", "65536", "less than or equal to 10"),
                ("optim.weight_decay", "1e9", "less than or equal to 100"),
                ("optim.clip", "1e300", "less than or equal to 1000000000"),
                ("batch.global_tokens", "99999999999", "less than or equal to 1000000000"),
                ("batch.tokens_per_rank", "-5", "greater than or equal to 3"),
                ("checkpoint.every", "99999999999", "less than or equal to 100000000"),
                ("parallel.step_timeout", "99999999999", "less than or equal to 100000000"),
                ("data.max_length", "99999999999", "less than or equal to 1000000"),
                ("data.folds", "99999999999", "less than or equal to 10000"),
            )
        ),
        (["out=/dev/zero"], "out: /dev/zero belongs to the system"),
        (["out=/proc/self/x"], "out: /proc/self/x belongs to the system"),
        # An environment variable that is not set, or may hold a secret.
        (["data.clusters=${SLURM_UNSET}/m"], "data.clusters: the environment variable SLURM_UNSET is not set"),
        (["out=sec/${HF_TOKEN}"], "out: a recipe does not read the environment variable HF_TOKEN, since it may hold a"),
        (["out=sec/${SLURM_JWT}"], "out: a recipe does not read the environment variable SLURM_JWT, since it may hold"),
    ],
)
def test_a_bad_override_is_refused_as_it_was_typed(
    path: Path, overrides: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "SLURM_JWT"):
        monkeypatch.setenv(name, "hf_secret")
    (found,) = problem(path, *overrides).splitlines()
    typed = next((one for one in overrides if found.startswith(f"{one}: ")), str(path))
    assert found.startswith(f"{typed}{':' if typed == str(path) else ': '}{expected}")
    assert "hf_secret" not in found


@pytest.mark.parametrize("option", ["--nproc", "--seeds", "--folds", "--profile"])
def test_options_are_bounded_too(option: str, path: Path) -> None:
    result = esmshard("finetune", "contact", option, "99999999999", cwd=path.parent)
    assert result.returncode == 2
    assert f"Invalid value for '{option}'" in result.stderr


def test_an_override_of_one_way_to_say_it_takes_the_place_of_the_other(path: Path) -> None:
    train = load(path, ["train.epochs=2"]).train
    assert (train.epochs, train.steps) == (2, None)
    edit(path, ("steps: 40", "epochs: 1.5"))
    assert load(path, ["train.steps=8"]).train == load(path, ["train.steps=8", "train.epochs=null"]).train
    assert load(path, ["train.steps=null"]).train.epochs == 1.5
    edit(path, ("train: {", "batch: {global_tokens: 99}\ntrain: {"))
    assert load(path, ["batch.sequences=8"]).batch.sequences == 8
    assert load(path, ["batch.sequences=null"]).batch.global_tokens == 99
    edit(path, ("global_tokens: 99", "sequences: 8"))
    assert load(path, ["batch.global_tokens=99"]).batch.sequences is None


def test_validation_and_test_set_follow_the_training_file(path: Path) -> None:
    own = load(path, ["data.train=/x/own.csv"]).data  # the file has a sample for validation
    assert (own.valid, own.test) == ("/x/own.csv", "/data/test.fasta")
    typed = load(path, ["data.train=/x/own.csv", "data.valid=/x/valid.csv", "data.test=null"]).data
    assert (typed.valid, typed.test) == ("/x/valid.csv", "/x/own.csv")
    assert load(path, ["data.train=sample:contact/test"]).data.valid == "sample:contact/valid"
    edit(path, ("  valid: sample:contact/valid\n", "  valid: /x/valid.fasta\n"))
    assert load(path, ["data.train=/x/own.csv"]).data.valid == "/x/valid.fasta"


def test_a_contradiction_in_the_file_is_shown_where_it_is(path: Path) -> None:
    edit(path, ("  train: train.fasta", "  mask: sample:x.fasta\n  train: train.fasta"))
    edit(path, ("steps: 40", "epochs: 1.5, steps: 40"))
    assert problems(path) == [
        f"{path}:5:9: data.mask: is for task residue, and the recipe has contact; remove it",
        f"{path}:12:17: train.epochs: is another way to say train.steps, which is 40; give one of the two",
    ]
    with pytest.raises(ValidationError, match="mask: is for task residue"):
        Recipe.model_validate(load_tree(path))


def load_tree(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = YAML(typ="safe").load(path.read_text())
    del tree["train"], tree["optim"]
    return tree


def test_the_sequence_task_takes_proteins_whole(path: Path) -> None:
    assert load(path, ["task={name: sequence}"]).data.long == "full"
    assert load(path, ["task={name: sequence}", "data.long=skip"]).data.long == "skip"
    for name in ("contact", "mlm", "residue"):
        assert load(path, [f"task={{name: {name}}}"]).data.long == "crop"


def test_lora_fills_in_its_defaults_and_other_methods_have_none(path: Path) -> None:
    none = dict.fromkeys(("rank", "alpha", "targets", "bias"))
    assert load(path).adapt.model_dump() == {"method": "full", "freeze": (), **none}
    found = load(path, ["adapt.method=lora", "adapt.rank=8", "adapt.targets=[v, q]"]).adapt
    assert (found.rank, found.alpha, found.targets, found.bias) == (8, 1.0, ("v", "q"), "all")
    assert found.lora == (8, 1.0, ("v", "q"))
    assert load(path, ["adapt.method=lora"]).adapt.targets == ("q", "k", "v", "out", "fc1", "fc2")
    for part in ("embedding", "layers.0-10"):
        assert load(path, [f"adapt.freeze=[{part}]"]).adapt.freeze == (part,)


def test_a_single_name_is_a_list_of_one() -> None:
    recipe = load(resolve("sequence"), ["data.target=Tm", "track=wandb"])
    assert (recipe.data.target, recipe.track) == (("Tm",), ("wandb",))
