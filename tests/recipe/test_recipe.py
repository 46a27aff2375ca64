"""Recipes: what is read, what is refused and where the message points, and what paths mean."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import shipped
from esmshard.io.remote import data_file
from esmshard.recipe import recipe_file
from esmshard.recipe.recipe_file import differences, dump, load, resolve, schema
from esmshard.recipe.sections import Recipe, TrainSettings
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


def test_a_shipped_recipe_loads_anywhere(path: Path) -> None:
    keys, tasks = ("train", "valid", "test", "labels", "mask", "clusters", "table", "wild_type"), set[str]()
    for name in recipe_file.names():
        recipe, written = load(resolve(name)), YAML(typ="safe").load(resolve(name).read_text())
        loaded = recipe.model_dump(mode="json")
        assert recipe.out == str(path.parent.parent / "work" / written.pop("out"))
        samples = [file for key in keys if str(file := getattr(recipe.data, key)).startswith("sample:")]
        assert len(samples) in ((0, 2) if recipe.task.name == "variant" else (0, 3, 4))
        assert all(data_file(file).is_file() for file in samples)
        for key in keys:  # a recipe to be copied names files of its user's
            if not str(written["data"].get(key, "sample:")).startswith("sample:"):
                assert loaded["data"].pop(key) == str(resolve(name).parent / written["data"].pop(key))
        for section, value in written.items():
            part = loaded[section]
            assert ({key: part[key] for key in value} if isinstance(value, dict) else part) == value, (name, section)
        tasks.add(recipe.task.name)
    assert tasks == {"contact", "mlm", "pair", "residue", "sequence", "variant"}


def test_a_copy_names_the_installed_schema(path: Path) -> None:
    lines = recipe_file.copy_of(resolve("contact")).splitlines()
    assert lines[0] == f"# yaml-language-server: $schema={shipped('recipes') / 'schema.json'}"
    assert Path(lines[0].partition("=")[2]).is_file()
    assert lines[1:] == resolve("contact").read_text().splitlines()[1:]
    assert recipe_file.copy_of(path) == TEXT  # one without that line stays as it is


def test_the_shipped_schema_is_that_of_the_settings() -> None:
    written = (shipped("recipes") / "schema.json").read_text()
    assert written == json.dumps(schema(), indent=1) + "\n", "esmshard recipes schema > recipes/schema.json"


CONTACT, TRAIN = "{name: contact, blocks: 2}", "{steps: 40, seed: 7}"
MISTAKES = [
    ("steps: 40", "steps: '40'", ":11:16: train.steps: Input should be a valid integer"),
    ("lr: 1e-4", "lr: .nan", ":9:7: optim.lr: Input should be a finite number"),
    ("clip: 2", "betas: [0.9]", ":10:3: optim.betas.1: Field required"),
    ("clip: 2", "betas: [0.5, 7]", ":10:16: optim.betas.1: Input should be less than 1"),
    (TRAIN, "3", ":11:8: train: Input should be a valid dictionary"),
    ("out: runs/x\n", "", ":1:1: out: Field required"),
    ("  train: train.fasta\n", "", ":4:1: data.train: this key is required"),
    ("  clip: 2", "  lr: 2", ":10:3: not YAML: found duplicate key"),
    (TEXT, "a: [1\nb: 2\n", ":2:2: not YAML: "),
    (TEXT, "- a\n", ":1:1: a recipe is a YAML mapping with the keys task, model, "),
    # What a tag or an impossible date does.
    (TEXT, "out: 2020-13-40", "month must be"),
    (TEXT, "train: {steps: !!int many}", "invalid literal"),
    (TEXT, "out: !!omap x", "a YAML tag does not fit"),
    # The keys of a task are checked by its name.
    (CONTACT, "{name: contct}", ":2:7: task: Input tag 'contct' found using 'name' does not match any"),
    (CONTACT, "{blocks: 2}", ":2:7: task: Unable to extract tag using discriminator 'name'"),
    (CONTACT, "{name: contact, blockz: 2}", ":2:23: task.blockz: unknown key; did you mean 'blocks'?"),
    (CONTACT, "{name: residue, classes: [H, 3]}", ":2:36: task.classes.1: Input should be a valid string"),
    # What a method of adaptation does not read.
    ("", "adapt: {rank: 8}", ":13:15: adapt.rank: is for adapt.method lora"),
    ("", "adapt: {method: head, freeze: [norms]}", ":13:31: adapt.freeze: is for adapt.method full"),
    ("", "adapt: {method: lora, targets: []}", ":13:32: adapt.targets: has no layer"),
    ("", "adapt: {method: lora, targets: [q, k, q]}", ":13:32: adapt.targets: has a name twice"),
]


def test_a_mistake_is_refused_at_its_place(path: Path) -> None:
    for old, new, expected in MISTAKES:
        path.write_text(TEXT)
        edit(path, (old, new))
        (found,) = problem(path).splitlines()
        assert found.startswith(str(path))
        assert expected in found
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
    found = sorted(problem.split(" ")[0] for problem in problems(path, "train.sed=1", "nonsense"))
    places = ("9:3", "11:16", "12:1", "1:1", "7:9")
    assert found == sorted([*(f"{path}:{place}:" for place in places), "train.sed=1:", "nonsense:"])


def test_overrides_change_values_and_make_sections(path: Path) -> None:
    recipe = load(path, ["optim.lr=3e-5", "train.steps = 9", "batch.global_tokens=64", "optim.schedule=linear"])
    assert (recipe.optim.lr, recipe.train.steps, recipe.train.seed) == (3e-5, 9, 7)
    assert (recipe.batch.global_tokens, recipe.optim.schedule) == (64, "linear")
    assert load(path, ["optim.lr=1", "optim.lr=2", "optim.betas=[0.8, 0.9]"]).optim.betas == (0.8, 0.9)
    assert load(path, ["train={steps: 3}"]).train == TrainSettings(steps=3)
    assert load(path, ["task={name: mlm, mask: 0.3}"]).task.model_dump() == {
        "name": "mlm",
        "mask": 0.3,
        "masking": "bert",
    }
    recipe = load(path)
    assert (recipe.optim.lr, recipe.optim.clip, type(recipe.optim.clip)) == (1e-4, 2.0, float)
    assert (recipe.train.steps, recipe.train.eval_every, recipe.optim.head_lr) == (40, 50, 2e-4)


RESIDUE = "{name: residue}\n"
PATHS: list[tuple[str, str, list[str], str, str | None]] = [
    # Paths of the file are relative to it, those of an override and `out` to the working directory.
    ("", "", [], "data.train", "FILE/train.fasta"),
    ("", "", [], "data.valid", "sample:contact/valid"),
    ("", "", [], "data.test", "/data/test.fasta"),
    ("", "", [], "out", "WORK/runs/x"),
    ("", "", ["data.train=a/t.fasta"], "data.train", "WORK/a/t.fasta"),
    ("", "", ["data={train: a/t.fasta}"], "data.train", "WORK/a/t.fasta"),
    ("", "", ["data.valid=sample:contact/test"], "data.valid", "sample:contact/test"),
    ("", "", ["out=/dev/shm/run"], "out", "/dev/shm/run"),  # shared memory is a place for a run
    ("train.fasta", "${SCRATCH}/${USER}/${USER}.fasta", [], "data.train", "/scratch/b/b.fasta"),
    ("", "", ["data.valid=~/v/${USER}.fasta"], "data.valid", "/home/someone/v/b.fasta"),
    ("", "", ["out=/runs/${SLURM_JOB_ID}"], "out", "/runs/17"),
    # A variable that is not set does no harm where an override takes its place.
    ("sample:contact/valid", "${SLURM_UNSET}/x", ["data.valid=v.fasta"], "data.valid", "WORK/v.fasta"),
    (CONTACT, RESIDUE, ["data.labels=b.csv"], "data.labels", "WORK/b.csv"),
    (CONTACT, RESIDUE, ["data.labels=null"], "data.labels", None),
    ("  train: train", "  clusters: ../c.tsv\n  train: train", [], "data.clusters", "FILE/../c.tsv"),
    # A model is a name, or the name of a repository of the hub, unless a path has it.
    ("", "", [], "model.name", "mini"),
    ("name: mini", "name: beside", [], "model.name", "FILE/beside"),
    ("", "", ["model.name=../m.pt"], "model.name", "WORK/../m.pt"),
    ("name: mini", "name: lab/other", [], "model.name", "lab/other"),
    ("name: mini", "name: lab/mine", [], "model.name", "FILE/lab/mine"),
    ("", "", ["model.name=lab/w.pt"], "model.name", "WORK/lab/w.pt"),
    ("", "", ["data.train=lab/train"], "data.train", "WORK/lab/train"),
]


def test_paths_and_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": "/home/someone", "SCRATCH": "/scratch", "USER": "b", "SLURM_JOB_ID": "17"}.items():
        monkeypatch.setenv(name, value)
    for name in ("beside", "lab/mine"):
        (path.parent / name).mkdir(parents=True)
    places = {"FILE": str(path.parent), "WORK": str(Path.cwd())}
    for old, new, overrides, key, expected in PATHS:
        path.write_text(TEXT)
        edit(path, (old, new))
        found: Any = load(path, overrides)
        for part in key.split("."):
            found = getattr(found, part)
        start, slash, rest = (expected or "").partition("/")
        assert found == (os.path.normpath(places[start] + slash + rest) if start in places else expected)


def test_a_dumped_recipe_loads_as_itself(path: Path) -> None:
    other = path.parent / "deeper" / "resolved.yaml"
    other.parent.mkdir()
    for overrides in (
        ["optim.lr=1e-7", "optim.betas=[0.5, 0.75]", "train.steps=null", "train.epochs=0.5"],
        ["data.folds=3", "data.fold=2", "adapt.method=lora"],
        ["task={name: variant}", "data={table: v.csv, wild_type: wt.fasta}"],
    ):
        recipe = load(path, overrides)
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
    for name in ("sample:contact/trian", "sample:contact/../contact/train"):
        with pytest.raises(InputError, match=f"^{name}: no such sample"):
            data_file(name)


def test_the_schema_describes_every_key() -> None:
    for name, section in schema()["$defs"].items():
        assert section["additionalProperties"] is False
        for key, entry in section["properties"].items():
            text = entry.get("description") or schema()["$defs"].get(entry.get("$ref", "").split("/")[-1], {})
            assert text or "const" in entry, (name, key)
            assert "default" in entry or key in section["required"]


VARIANT = ("task={name: variant}", "data={table: v.csv, wild_type: wt.fasta}")
REFUSED = [
    (["optim.lrr=1"], "optim.lrr: unknown key; did you mean 'lr'?"),
    (["optim.lr"], "an override is KEY=VALUE, such as optim.lr=1e-4"),
    (["optim.lr.x=1"], "lr is no section"),
    (["task.name=mlm"], "2:23: task.blocks: unknown key"),
    # Keys that do not go together.
    (["train.steps=4", "train.epochs=2"], "train.epochs: and train.steps=4 are two lengths"),
    (["batch.sequences=8", "batch.global_tokens=99"], "batch.sequences: and batch.global_tokens=99"),
    (["data.fold=2"], "data.fold: needs data.folds"),
    (["data.folds=3", "data.fold=3"], "data.fold: is 3, but"),
    (["data.folds=3"], "data.folds: makes 3 parts"),
    (["data.labels=x.csv"], "data.labels: is for task pair, residue and sequence, but the recipe has task contact"),
    (["task={name: sequence}", "data.long=crop"], "data.long: crop may cut off the cause"),
    (["task={name: sequence, hidden: 0, pooling: attention}", "adapt.method=probe"], "adapt.method: probe reads mean"),
    (["task={name: mlm}", "adapt.method=probe"], "adapt.method: probe is not offered by task mlm"),
    (["model.quantize=nf4", "adapt.method=full"], "adapt.method: full cannot train the weights"),
    (["model.quantize=int8", "adapt.method=lora", "parallel.compile=true"], "parallel.compile: does not work"),
    ([*VARIANT, "data.train=x"], "data.train: is for the other tasks"),
    ([*VARIANT, "data.long=skip"], "data.long: skip leaves variants out"),
    ([*VARIANT, "data.train_max=2"], "data.train_max: is for data.split mutations"),
    ([*VARIANT, "data.split=given", "data.folds=5"], "data.folds: divides the table"),
    ([*VARIANT, "data.split=random", "data.folds=cv"], "data.split: random divides the table"),
    (["data.folds=cv"], "data.folds: cv is no number"),
    ([*VARIANT, "data.align=none"], "data.align: is for a list of tables"),
    ([*VARIANT, "data.target=[y]", "data.lower_is_better=[kd]"], "data.lower_is_better: kd is no target"),
    ([*VARIANT, "task.loss=ranking", "data.transform=log"], "data.transform: log has no effect"),
    ([*VARIANT, "adapt.method=probe"], "adapt.method: probe fits a linear head"),
    (["adapt.freeze=[norms, layers.0-1-2]"], "adapt.freeze: 'layers.0-1-2' is no part of the model"),
    (["adapt.freeze=[layers.all-but-0]"], "adapt.freeze: 'layers.all-but-0' is no part of the model"),
    (["adapt.freeze=[layers.-1]"], "adapt.freeze: 'layers.-1' is no part of the model"),
    (["adapt.freeze=[layers.3-1]"], "adapt.freeze: 'layers.3-1' ends before it begins"),
    # Numbers and places that no run has.
    (["train.steps=99999999999"], "train.steps: Input should be less than or equal to 100000000"),
    (["batch.tokens_per_rank=-5"], "batch.tokens_per_rank: Input should be greater than or equal to 3"),
    (["out=/proc/self/x"], "out: /proc/self/x belongs to the operating system"),
    # An environment variable that is not set, or may hold a secret.
    (["data.clusters=${SLURM_UNSET}/m"], "data.clusters: the environment variable SLURM_UNSET is not set"),
    (["out=sec/${HF_TOKEN}"], "out: a recipe may not read the environment variable HF_TOKEN"),
    (["out=sec/${SLURM_JWT}"], "out: a recipe may not read the environment variable SLURM_JWT"),
]


def test_a_bad_override_is_refused_as_it_was_typed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "SLURM_JWT"):
        monkeypatch.setenv(name, "hf_secret")
    for overrides, expected in REFUSED:
        (found,) = problem(path, *overrides).splitlines()
        typed = next((text for text in overrides if found.startswith(f"{text}: ")), str(path))
        assert found.startswith(f"{typed}{':' if typed == str(path) else ': '}{expected}")
        assert "hf_secret" not in found


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
    several = load(resolve("variants"), ["data.table=[/x/a.csv, b.csv]"]).data
    assert several.tables == ("/x/a.csv", str(Path.cwd() / "b.csv"))
    assert (several.wild_type, several.align) == ("/x/a.csv", "shift")
    variants = load(resolve("variants"), ["data.table=/x/own.csv"]).data
    assert (variants.wild_type, variants.table) == ("/x/own.csv", "/x/own.csv"), "the wild type follows from the table"
    edit(path, ("  valid: sample:contact/valid\n", "  valid: /x/valid.fasta\n"))
    assert load(path, ["data.train=/x/own.csv"]).data.valid == "/x/valid.fasta"


def test_a_contradiction_in_the_file_is_shown_where_it_is(path: Path) -> None:
    edit(path, ("  train: train.fasta", "  mask: sample:x.fasta\n  train: train.fasta"))
    edit(path, ("steps: 40", "epochs: 1.5, steps: 40"))
    first, second = problems(path)
    assert first.startswith(f"{path}:5:9: data.mask: is for task residue")
    assert second.startswith(f"{path}:12:17: train.epochs: and train.steps=40 are two lengths of the run")


def test_defaults_follow_from_task_and_method(path: Path) -> None:
    assert load(path, ["task={name: sequence}"]).data.long == "full"
    assert load(path, ["task={name: sequence}", "data.long=skip"]).data.long == "skip"
    for name in ("contact", "mlm", "residue"):
        assert load(path, [f"task={{name: {name}}}"]).data.long == "crop"
    none = dict.fromkeys(("rank", "alpha", "targets", "bias"))
    assert load(path).adapt.model_dump() == {"method": "full", "freeze": (), **none}
    found = load(path, ["adapt.method=lora", "adapt.rank=8", "adapt.targets=[v, q]"]).adapt
    assert (found.rank, found.alpha, found.targets, found.bias) == (8, 1.0, ("v", "q"), "all")
    assert load(path, ["adapt.method=lora"]).adapt.targets == ("q", "k", "v", "out", "fc1", "fc2")
    recipe = load(resolve("sequence"), ["data.target=Tm", "track=wandb"])  # a single name is a list of one
    assert (recipe.data.target, recipe.track) == (("Tm",), ("wandb",))
