"""The starter and the demo model, which come with the package, have learned from their data."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from esmshard.batch import Inputs, pack
from esmshard.data.labels.coordinates import UNRESOLVED, contact_labels
from esmshard.io.paths import shipped
from esmshard.model import weights
from esmshard.model.config import SHIPPED
from esmshard.model.contacts import predict_contacts
from esmshard.recipe import recipe_file
from esmshard.tasks.contact import contact_precision
from esmshard.tasks.finetuned import load_finetuned, new_head
from esmshard.tasks.mlm import corrupt
from esmshard.tasks.registry import new_task
from esmshard.train.inputs import leakage_notices, prepare
from esmshard.vocab import encode

CPU = torch.device("cpu")


Chains = list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8]]]


@pytest.fixture(scope="module")
def chains() -> Chains:
    """Tokens and contacts of 12 test chains, which no shipped model was trained on."""
    with np.load(shipped("data") / "contact" / "test.npz") as file:
        seqs, offsets, cb = (file[key] for key in ("seqs", "offsets", "cb_dA"))
    parts = np.split(cb, offsets[1:13])[:12]
    cbs = [np.where(part == UNRESOLVED, np.nan, part / 10).astype(np.float32) for part in parts]
    return [(encode(str(text)), contact_labels(cb_L3)) for text, cb_L3 in zip(seqs[:12], cbs, strict=True)]


def mean(rows: list[dict[str, float]], name: str) -> float:
    return float(np.nanmean([row[name] for row in rows]))


def test_its_contact_head_has_learned(chains: Chains) -> None:
    model = load_finetuned("starter", CPU).model
    rows = [contact_precision(model.outputs([Inputs(t, y)])[0], y) for t, y in chains]
    chance = [contact_precision(None, y) for _, y in chains]
    assert mean(rows, "long P@L") > 3 * mean(chance, "long P@L")
    assert mean(rows, "all P@L/5") > 8 * mean(chance, "all P@L/5")


def test_a_recipe_goes_on_with_the_head_of_the_starter() -> None:
    size = ["task.channels=16", "task.blocks=4"]
    recipe = recipe_file.load(recipe_file.resolve("contact"), ["model.name=starter", *size])
    found = weights.read("starter")
    head, told = new_head(recipe, new_task(recipe.task, {}), found)
    assert told is not None
    assert told.startswith("the head goes on from the contact head of ")
    assert all(torch.equal(tensor, found.head[name]()) for name, tensor in head.state_dict().items())


def test_the_contact_recipe_starts_from_a_model_that_has_seen_no_contact_and_none_of_the_sample() -> None:
    recipe = recipe_file.load(recipe_file.resolve("contact"))
    assert (recipe.model.name, recipe.init) == ("demo", "pretrained")
    _, told = new_head(recipe, new_task(recipe.task, {}), weights.read("demo"))
    assert told is None, "its head is new"
    job = prepare(recipe, 1, 1, CPU)
    assert not any(str(weights.place("demo")) in notice for notice in leakage_notices(job))


def test_its_contact_regression_was_fitted(chains: Chains) -> None:
    """The precision is low, because the starter learned contacts in its contact head, not in its attention."""
    trunk = weights.load_model("starter", CPU)
    with torch.no_grad():
        rows = [contact_precision(predict_contacts(trunk, pack([t]))[0].numpy(), y) for t, y in chains]
    assert mean(rows, "all P@L/5") > 1.5 * mean([contact_precision(None, y) for _, y in chains], "all P@L/5")


@pytest.mark.filterwarnings("ignore:.*contact")
@pytest.mark.parametrize("name", SHIPPED)
def test_its_lm_head_knows_more_than_frequencies(name: str, chains: Chains) -> None:
    trunk = weights.load_model(name, CPU)
    loss = count = 0.0
    for n, (tokens, _) in enumerate(chains):
        hidden, at_P = corrupt(tokens, 0.15, f"test:{n}")
        with torch.no_grad():
            logits = trunk(pack([hidden]), logits_at=torch.from_numpy(at_P)).logits_PV
        loss += float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(tokens[at_P]).long(), reduction="sum"))
        count += len(at_P)
    assert np.exp(loss / count) < 17, "the frequencies of the amino acids give about 18"
