"""Recipes: what is read, what is refused and where the message points, and what paths mean."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from esmshard.errors import InputError, UsageError
from esmshard.io.paths import shipped
from esmshard.io.remote import data_file
from esmshard.recipe import recipe_file
from esmshard.recipe.recipe_file import differences, dump, load, resolve, schema
from esmshard.recipe.sections import Recipe, TaskSettings
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


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


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
    assert recipe.task == ContactSettings(name="contact", head="pairwise", channels=32, blocks=2)
    assert (recipe.train.steps, recipe.train.seed, recipe.train.eval_every) == (40, 7, 50)
    assert (recipe.optim.head_lr, recipe.optim.betas, recipe.init) == (2e-4, (0.9, 0.98), "pretrained")
    assert recipe.batch.tokens_per_rank == "auto"


@pytest.mark.parametrize(("written", "value"), [("1e-4", 1e-4), ("2", 2.0)])
def test_a_learning_rate_is_a_number_however_it_is_written(path: Path, written: str, value: float) -> None:
    edit(path, "lr: 1e-4", f"lr: {written}")
    assert (load(path).optim.lr, type(load(path).optim.lr)) == (value, float)
    path.write_text(TEXT)
    assert load(path, [f"optim.lr={written}"]).optim.lr == value


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps: 40", "steps: many", "11:16: train.steps: Input should be a valid integer"),
        ("steps: 40", "steps: '40'", "11:16: train.steps: Input should be a valid integer"),
        ("steps: 40", "steps: 0", "11:16: train.steps: Input should be greater than or equal to 1"),
        ("lr: 1e-4", "lr: .nan", "9:7: optim.lr: Input should be a finite number"),
        ("name: mini", "name: 3", "3:15: model.name: Input should be a valid string"),
    ],
)
def test_a_wrong_value_is_refused_with_the_place_of_the_value(path: Path, old: str, new: str, expected: str) -> None:
    edit(path, old, new)
    assert problem(path) == f"{path}:{expected}"


@pytest.mark.parametrize("betas", ["[0.9]", "0.9", "[5, 7]"])
def test_betas_are_two_numbers_below_one(path: Path, betas: str) -> None:
    edit(path, "clip: 2", f"betas: {betas}")
    found = problems(path)
    assert all(p.startswith(f"{path}:10:") and ": optim.betas" in p for p in found)
    path.write_text(TEXT)
    assert load(path, ["optim.betas=[0.8, 0.9]"]).optim.betas == (0.8, 0.9)


def test_a_section_that_is_no_mapping_is_refused_in_its_line(path: Path) -> None:
    section = "train: 3"
    edit(path, "train: {steps: 40, seed: 7}", section)
    found = problem(path)
    assert found.startswith(f"{path}:11:")
    assert ": train: Input should be a valid dictionary" in found


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("out: runs/x\n", "1:1: out: Field required"),
        ("  train: train.fasta\n", "4:1: data.train: this key is required"),
    ],
)
def test_a_missing_key_is_refused(path: Path, old: str, expected: str) -> None:
    edit(path, old, "")
    assert problem(path) == f"{path}:{expected}"


def test_a_key_given_twice_is_refused(path: Path) -> None:
    old = "  clip: 2"
    new = "  lr: 2"
    expected = "10:3"
    edit(path, old, new)
    assert problem(path).startswith(f"{path}:{expected}: not YAML: found duplicate key")


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [1\nb: 2\n", 2), ("a: 1\n---\nb: 2\n", 2)],
)
def test_what_is_not_yaml_is_refused_with_its_line(path: Path, text: str, line: int) -> None:
    path.write_text(text)
    found = problem(path)
    assert found.startswith(f"{path}:{line}:")
    assert ": not YAML: " in found


def test_what_is_no_mapping_is_refused(path: Path) -> None:
    path.write_text("- a\n")
    assert problem(path).startswith(f"{path}:1:1: a recipe is a YAML mapping with the keys task, model, ")
    path.write_text("# nothing\n")
    assert problems(path) == [f"{path}:1:1: {key}: Field required" for key in ("task", "model", "data", "out")]


def test_what_is_no_text_is_refused(path: Path) -> None:
    data = b"out: \xff\xfe\n"
    path.write_bytes(data)
    assert problem(path).startswith(f"{path}:")


def test_a_missing_file_and_a_directory_are_refused(path: Path) -> None:
    path.unlink()
    for place in (path, path.parent):
        assert problem(place).startswith(f"{place}: cannot be read: ")


def test_all_problems_are_reported_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_UNSET", raising=False)
    edit(path, "  lr:", "  lrr:")
    edit(path, "steps: 40", "steps: many")
    edit(path, "out:", "outt:")
    edit(path, "/data/test", "${SLURM_UNSET}/test")
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
    assert load(path, ["optim.lr=1", "optim.lr=2"]).optim.lr == 2
    assert load(path, ["train={steps: 3}"]).train.model_dump() == {
        "steps": 3,
        "epochs": None,
        "seed": 0,
        "eval_every": 50,
        "early_stop": None,
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean 'lr'?"),
        ("train={stepz: 1}", "train.stepz: unknown key; did you mean 'steps'?"),
        ("train.steps=x", "train.steps: Input should be a valid integer"),
        ("optim.lr", "an override is KEY=VALUE, such as optim.lr=1e-4"),
        ("optim.lr.x=1", "lr has no keys of its own"),
    ],
)
def test_a_bad_override_is_refused_as_it_was_typed(path: Path, override: str, expected: str) -> None:
    assert problem(path, override) == f"{override}: {expected}"


def test_label_files_are_paths_too(path: Path) -> None:
    here = path.parent
    edit(path, "{name: contact, blocks: 2}", "{name: residue}")
    edit(path, "  train: train.fasta", "  labels: a.csv\n  mask: ../m.fasta\n  clusters: ~/c.tsv\n  train: t")
    data = load(path).data
    assert (data.labels, data.mask) == (str(here / "a.csv"), str(here.parent / "m.fasta"))
    assert data.clusters == str(Path("~/c.tsv").expanduser())
    assert load(path, ["data.labels=b.csv"]).data.labels == str(Path.cwd() / "b.csv")
    assert load(path, ["data.labels=sample:contact/labels.csv"]).data.labels == "sample:contact/labels.csv"
    assert load(path, ["data.labels=null"]).data.labels is None
    assert problem(path, "data.mask=${SLURM_UNSET}/m") == (
        "data.mask=${SLURM_UNSET}/m: data.mask: the environment variable SLURM_UNSET is not set"
    )


def test_data_and_model_paths_are_relative_to_the_recipe(path: Path) -> None:
    edit(path, "name: mini", "name: ../weights/esm.pt")
    recipe = load(path)
    assert recipe.data.train == str(path.parent / "train.fasta")
    assert recipe.data.test == "/data/test.fasta"
    assert recipe.data.valid == "sample:contact/valid"
    assert recipe.model.name == str(path.parent.parent / "weights" / "esm.pt")


def test_out_and_overrides_are_relative_to_the_working_directory(path: Path) -> None:
    assert load(path).out == str(Path.cwd() / "runs" / "x")
    recipe = load(path, ["data.train=a/t.fasta", "model.name=../m.pt", "out=o", "data.valid=sample:contact/test"])
    assert Path.cwd() != path.parent
    assert recipe.data.train == str(Path.cwd() / "a" / "t.fasta")
    assert recipe.model.name == str(Path.cwd().parent / "m.pt")
    assert recipe.out == str(Path.cwd() / "o")
    assert recipe.data.valid == "sample:contact/test"


def test_a_model_is_a_name_unless_it_lies_beside_the_recipe(path: Path) -> None:
    assert load(path).model.name == "mini"
    assert load(path, ["model.name=esm2_t6_8M_UR50D"]).model.name == "esm2_t6_8M_UR50D"
    (path.parent / "mini").mkdir()
    assert load(path).model.name == str(path.parent / "mini")


def test_a_repository_of_the_hub_stays_a_name_unless_a_path_has_it(path: Path) -> None:
    edit(path, "name: mini", "name: lab/esm2_mine")
    assert load(path).model.name == "lab/esm2_mine"
    assert load(path, ["model.name=facebook/esm2_t6_8M_UR50D"]).model.name == "facebook/esm2_t6_8M_UR50D"
    assert load(path, ["model.name=lab/w.pt"]).model.name == str(Path.cwd() / "lab" / "w.pt")
    assert load(path, ["data.train=lab/train"]).data.train == str(Path.cwd() / "lab" / "train"), "of models only"
    (path.parent / "lab" / "esm2_mine").mkdir(parents=True)
    assert load(path).model.name == str(path.parent / "lab" / "esm2_mine")


def test_home_and_variables_expand(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("USER", "b")
    edit(path, "/data/test.fasta", "~/data/test.fasta")
    edit(path, "train.fasta", "${SCRATCH}/${USER}/${USER}.fasta")
    edit(path, "runs/x", "${SCRATCH}/runs")
    recipe = load(path, ["data.valid=~/v/${USER}.fasta"])
    assert recipe.data.test == "/home/someone/data/test.fasta"
    assert recipe.data.train == "/scratch/b/b.fasta"
    assert recipe.data.valid == "/home/someone/v/b.fasta"
    assert recipe.out == "/scratch/runs"


def test_a_dumped_recipe_loads_as_itself(path: Path) -> None:
    recipe = load(path, ["optim.lr=1e-7", "optim.betas=[0.5, 0.75]", "batch.tokens_per_rank=99"])
    other = path.parent / "deeper" / "resolved.yaml"
    other.parent.mkdir()
    other.write_text(dump(recipe))
    assert load(other) == recipe
    assert dump(load(other)) == dump(recipe)


def keys_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        of_all_tasks = field.annotation is TaskSettings  # whose keys are those of the tasks
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and not of_all_tasks:
            keys += keys_of(field.annotation, f"{prefix}{name}.")
    return keys


def all_keys() -> list[str]:
    """Every key that a recipe of some task may have."""
    keys = keys_of(Recipe)
    return (
        keys[:1] + [f"task.{key}" for section in registered().settings.values() for key in keys_of(section)] + keys[1:]
    )


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


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("contct", "contct: neither a file nor a shipped recipe (contact); did you mean 'contact'?"),
        ("mine.yaml", "mine.yaml: no such recipe file; `esmshard recipes cp contact my.yaml` makes one"),
    ],
)
@pytest.mark.usefixtures("path")
def test_an_unknown_recipe_is_refused_with_a_hint(name: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(name)
    assert str(error.value) == sentence.replace("(contact)", f"({', '.join(recipe_file.names())})")


def test_a_sample_is_a_shipped_file_and_a_path_stays_a_path() -> None:
    assert data_file("sample:contact/train") == shipped("data") / "contact" / "train.fasta"
    assert data_file("sample:contact/train.npz") == shipped("data") / "contact" / "train.npz"
    assert data_file("/data/x.fasta") == Path("/data/x.fasta")


@pytest.mark.parametrize("name", ["sample:contact/trian", "sample:contact/../contact/train"])
def test_an_unknown_sample_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InputError) as error:
        data_file(name)
    fastas = ("contact/test", "contact/train", "contact/valid", "pairs/test", "pairs/train", "pairs/valid")
    tables = ("contact/labels.csv", "pairs/labels.csv", "variants/landscape.csv", "variants/truth.csv")
    known = ", ".join(f"sample:{one}" for one in (*fastas, "variants/wild_type", *tables))
    assert str(error.value) == f"{name}: no such sample; there are {known}"


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
    assert described == all_keys()
    assert len(described) > 60
    assert math.isclose(tree["$defs"]["OptimSettings"]["properties"]["lr"]["default"], 2e-5)


# Tasks


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("{name: contct}", "2:7: task: Input tag 'contct' found using 'name' does not match any"),
        ("{blocks: 2}", "2:7: task: Unable to extract tag using discriminator 'name'"),
        ("{name: contact, blockz: 2}", "2:23: task.blockz: unknown key; did you mean 'blocks'?"),
        ("{name: mlm, mask: 0.9}", "2:25: task.mask: Input should be less than or equal to 0.5"),
        ("{name: residue, classes: [H, 3]}", "2:36: task.classes.1: Input should be a valid string"),
    ],
)
def test_the_keys_of_a_task_are_checked_by_its_name(path: Path, task: str, expected: str) -> None:
    edit(path, "{name: contact, blocks: 2}", task)
    assert problem(path).startswith(f"{path}:{expected}")


def test_an_override_changes_the_task(path: Path) -> None:
    assert problem(path, "task.name=mlm") == f"{path}:2:23: task.blocks: unknown key"
    assert load(path, ["task={name: mlm, mask: 0.3}"]).task.model_dump() == {"name": "mlm", "mask": 0.3}
    assert problem(path, "task={name: mlm, mask: x}") == (
        "task={name: mlm, mask: x}: task.mask: Input should be a valid number"
    )


@pytest.mark.parametrize("name", ["contact", "variant"])
def test_a_recipe_of_any_task_is_dumped_and_loaded(path: Path, name: str) -> None:
    data = ["data={table: v.csv, wild_type: wt.fasta}"] if name == "variant" else []
    recipe = load(path, [f"task={{name: {name}}}", *data])
    path.with_name("again.yaml").write_text(dump(recipe))
    assert load(path.with_name("again.yaml")) == recipe == Recipe.model_validate(recipe.model_dump(mode="json"))
    assert type(recipe.task) is registered().settings[name]


# Keys that do not go together

VARIANT = ("task={name: variant}", "data={table: v.csv, wild_type: wt.fasta}")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.steps=4", "train.epochs=2"], "train.epochs: is another way to say train.steps, which is 4; give one"),
        (["data.fold=2"], "data.fold: is one of data.folds, and the recipe has none; add data.folds, or remove it"),
        (["data.folds=3", "data.fold=3"], "data.fold: is counted from 0, and of 3 folds the last one is 2, not 3"),
        (
            ["data.labels=x.csv"],
            "data.labels: is for task pair, residue and sequence, and the recipe has contact",
        ),
        (["task={name: sequence}", "data.mask=x"], "data.mask: is for task residue, and the recipe has sequence; rem"),
        (
            ["task={name: sequence}", "data.long=crop"],
            "data.long: crop may remove the cause of the label of a protein; choose full or skip",
        ),
        (
            ["task={name: mlm}", "adapt.method=probe"],
            "adapt.method: probe is not offered by task mlm; choose full, lora or head",
        ),
        (
            ["model.quantize=nf4", "adapt.method=full"],
            "adapt.method: full trains the weights that model.quantize=nf4 freezes; set adapt.method=lora, or pass",
        ),
        (
            ["model.quantize=int8", "adapt.method=lora", "parallel.compile=true"],
            "parallel.compile: cannot compile the unpacking of model.quantize; pass parallel.compile=false",
        ),
        ([*VARIANT, "data.train=x"], "data.train: is for the other tasks, and the recipe has variant, which divides"),
        (
            [*VARIANT, "data.long=skip"],
            "data.long: skip leaves variants out; choose full, or window for a part of a lo",
        ),
        (
            [*VARIANT, "data.train_max=2"],
            "data.train_max: is for data.split mutations, and the recipe has position; re",
        ),
        (
            [*VARIANT, "data.split=given", "data.folds=5"],
            "data.folds: divides the table, and data.split given does so in another way; remove one of them",
        ),
        (
            [*VARIANT, "data.target=[y]", "data.lower_is_better=[kd]"],
            "data.lower_is_better: kd is no target; data.target names y",
        ),
        (
            [*VARIANT, "task.loss=ranking", "data.transform=log"],
            "data.transform: log has no effect on task.loss ranking",
        ),
        ([*VARIANT, "adapt.method=probe"], "adapt.method: probe fits a linear head; set task.hidden: 0"),
        (
            ["data.folds=3"],
            "data.folds: makes 3 parts, and a run is tested on one of them; to train all 3 runs, remove it and pass "
            "--folds 3; to train one, add data.fold, from 0 to 2",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(path: Path, overrides: list[str], expected: str) -> None:
    found = problem(path, *overrides)
    assert found.startswith(f"{overrides[-1]}: {expected}")


def test_an_override_of_one_way_to_say_it_takes_the_place_of_the_other(path: Path) -> None:
    train = load(path, ["train.epochs=2"]).train
    assert (train.epochs, train.steps) == (2, None)
    edit(path, "steps: 40", "epochs: 1.5")
    assert load(path, ["train.steps=8"]).train == load(path, ["train.steps=8", "train.epochs=null"]).train
    assert load(path, ["train.steps=null"]).train.epochs == 1.5
    edit(path, "train: {", "batch: {global_tokens: 99}\ntrain: {")
    assert load(path, ["batch.sequences=8"]).batch.sequences == 8
    assert load(path, ["batch.sequences=null"]).batch.global_tokens == 99
    edit(path, "global_tokens: 99", "sequences: 8")
    assert load(path, ["batch.global_tokens=99"]).batch.sequences is None
    assert "batch.sequences: is another way" in problem(path, "batch.sequences=8", "batch.global_tokens=99")


def test_validation_and_test_set_follow_the_training_file(path: Path) -> None:
    own = load(path, ["data.train=/x/own.csv"]).data  # the file has a sample for validation
    assert (own.valid, own.test) == ("/x/own.csv", "/data/test.fasta")
    typed = load(path, ["data.train=/x/own.csv", "data.valid=/x/valid.csv", "data.test=null"]).data
    assert (typed.valid, typed.test) == ("/x/valid.csv", "/x/own.csv")
    assert load(path, ["data.train=sample:contact/test"]).data.valid == "sample:contact/valid"
    edit(path, "  valid: sample:contact/valid\n", "  valid: /x/valid.fasta\n")
    assert load(path, ["data.train=/x/own.csv"]).data.valid == "/x/valid.fasta"


def test_a_contradiction_in_the_file_is_shown_where_it_is(path: Path) -> None:
    edit(path, "  train: train.fasta", "  mask: sample:x.fasta\n  train: train.fasta")
    edit(path, "steps: 40", "epochs: 1.5, steps: 40")
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


def test_what_is_written_out_contradicts_nothing(path: Path) -> None:
    again = path.with_name("again.yaml")
    for overrides in (["train.steps=null", "train.epochs=0.5"], ["data.folds=3", "data.fold=2"], ["data.fold=0"]):
        recipe = load(path, overrides)
        again.write_text(dump(recipe))
        assert load(again) == recipe
    # Folds come from the command line, on top of a recipe that names their clusters.
    assert load(path, ["data.clusters=c.tsv"]).data.folds is None


@pytest.mark.parametrize("freeze", ["embedding", "layers.0-10"])
def test_parts_of_the_model_can_be_frozen(path: Path, freeze: str) -> None:
    assert load(path, [f"adapt.freeze=[{freeze}]"]).adapt.freeze == (freeze,)


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        *(
            (
                f"[norms, {part}]",
                f"'{part}' is no part of the model; name embedding, norms, biases, tracks, or layers as",
            )
            for part in ("layers", "layers.", "layers.a", "layers.-1", "layers.1-", "layers.0-1-2", "norm", "head")
        ),
        ("[layers.3-1]", "'layers.3-1' ends before it begins; write the first layer first, from 0"),
    ],
)
def test_what_is_no_part_of_the_model_cannot_be_frozen(path: Path, freeze: str, expected: str) -> None:
    assert problem(path, f"adapt.freeze={freeze}").startswith(f"adapt.freeze={freeze}: adapt.freeze: {expected}")


def test_the_sequence_task_takes_proteins_whole(path: Path) -> None:
    assert load(path, ["task={name: sequence}"]).data.long == "full"
    assert load(path, ["task={name: sequence}", "data.long=skip"]).data.long == "skip"
    for name in ("contact", "mlm", "residue"):
        assert load(path, [f"task={{name: {name}}}"]).data.long == "crop"


def test_an_unset_variable_does_no_harm_where_an_override_stands_in_for_it(path: Path) -> None:
    text = path.read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("valid:"))
    path.write_text(text.replace(line, "  valid: ${SLURM_NOT_SET}/x.fasta"))
    assert "SLURM_NOT_SET" in problem(path)
    assert load(path, ["data.valid=mine.fasta"]).data.valid == str(Path.cwd() / "mine.fasta")


def test_lora_fills_in_its_defaults_and_other_methods_have_none(path: Path) -> None:
    assert load(path).adapt.model_dump() == {
        "method": "full",
        "freeze": (),
        "rank": None,
        "alpha": None,
        "targets": None,
        "bias": None,
    }
    found = load(path, ["adapt.method=lora", "adapt.rank=8", "adapt.targets=[v, q]"]).adapt
    assert (found.rank, found.alpha, found.targets, found.bias) == (8, 1.0, ("v", "q"), "all")
    assert found.lora == (8, 1.0, ("v", "q"))
    assert load(path, ["adapt.method=lora"]).adapt.targets == ("q", "k", "v", "out", "fc1", "fc2")
    for method in ("full", "lora", "head"):
        recipe = load(path, [f"adapt.method={method}"])
        path.with_name("again.yaml").write_text(dump(recipe))
        assert load(path.with_name("again.yaml")) == recipe == Recipe.model_validate(recipe.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{rank: 8}", "13:15: adapt.rank: is for adapt.method lora, and the recipe has full; remove it, or change"),
        (
            "{method: head, freeze: [norms]}",
            "13:31: adapt.freeze: is for adapt.method full, and the recipe has head; remove it, or change the method",
        ),
        ("{method: lora, targets: []}", "13:32: adapt.targets: names no layer; name some, or set adapt.method: head"),
        ("{method: lora, targets: [q, k, q]}", "13:32: adapt.targets: has a name twice (q, k, q); write each once"),
    ],
)
def test_what_a_method_does_not_read_is_refused(path: Path, section: str, expected: str) -> None:
    path.write_text(f"{TEXT}adapt: {section}\n")
    assert problem(path).startswith(f"{path}:{expected}")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("data.target=Tm", "data", "target", ("Tm",)),
        ("track=wandb", None, "track", ("wandb",)),
    ],
)
def test_a_single_name_is_a_list_of_one(override: str, section: str | None, key: str, value: tuple[str, ...]) -> None:
    found = load(resolve("sequence"), [override])
    assert getattr(found if section is None else getattr(found, section), key) == value
