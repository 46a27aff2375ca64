"""The head `gp` of task variant: scikit-learn's Gaussian process, sums over changes, intervals, and its recipes."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

sys.path.insert(0, str(Path(__file__).parent))
from test_variant_task import WT, mutant

from esmshard.batch import pack_variants
from esmshard.errors import InputError
from esmshard.recipe import recipe_file
from esmshard.tasks.gaussian_process import OF_CHANGES, PRIOR, SLOPE, Features, GaussianProcessHead
from esmshard.tasks.metrics import coverage
from esmshard.vocab import encode

DIM = 6


def head(variants: int, changes: int, *, differences: bool = False, near: bool = False) -> GaussianProcessHead:
    sizes = {"variants": variants, "changes": changes}
    places = [[10.0 * n, 0.0, 0.0] for n in range(len(WT))] if near else None
    return GaussianProcessHead(DIM, sizes, 1.0, differences=differences, zero_shot=True, places=places)


def described(count: int, seed: int = 0, *, differences: bool = False, near: bool = False) -> Features:
    """Random features of single substitutions at 10 sites, with letters that differ from variant to variant."""
    random = np.random.default_rng(seed)
    sites_SD, roots_SA = np.random.default_rng(9).normal(size=(10, DIM)), np.random.default_rng(9).random((10, 20))
    site_N = random.integers(10, size=count)
    letters_2N = random.integers(4, 24, size=(2, count))
    return Features(
        torch.arange(count),
        *map(torch.from_numpy, letters_2N),
        torch.from_numpy(sites_SD[site_N] / DIM**0.5),
        torch.from_numpy(roots_SA[site_N]),
        torch.from_numpy(sites_SD[site_N][:, : 3 * near]),
        torch.from_numpy(random.normal(size=count)),
        torch.from_numpy(random.normal(size=(count, DIM * differences))),
    )


@torch.no_grad()
def predicted(fitted: GaussianProcessHead, features: Features) -> np.ndarray:
    """Call the head with features in place of a batch."""
    fitted.features = lambda *_: features  # type: ignore[method-assign]
    return torch.stack(fitted(torch.empty(0), None)).numpy()  # type: ignore[arg-type]


@torch.no_grad()
def test_it_is_scikit_learns_gaussian_process() -> None:
    known, asked, noise = described(30), described(40, seed=1), 0.2
    gp, y = head(30, 30), torch.from_numpy(np.random.default_rng(2).normal(size=30))
    gp.fit(known, y)
    values = dict.fromkeys(PRIOR, 1e-9) | {"noise": noise, "size": 0.7, "site": 0.4, "slope": 0.3}
    gp.hyperparameters.copy_(torch.tensor([*values.values()]))
    score, deviation = known.score_N.mean(), known.score_N.std()

    def columns(x: Features) -> np.ndarray:  # the kernel of the score needs a column without the sites
        return np.column_stack([x.site_MD.numpy(), ((x.score_N - score) / deviation).numpy()])

    class Sites(RBF):  # scikit-learn's kernel of the first columns
        def __call__(self, X, Y=None, eval_gradient=False):  # type: ignore[no-untyped-def]
            return super().__call__(X[:, :DIM], None if Y is None else Y[:, :DIM])

    class Scores(DotProduct):
        def __call__(self, X, Y=None, eval_gradient=False):  # type: ignore[no-untyped-def]
            return super().__call__(X[:, DIM:], None if Y is None else Y[:, DIM:])

        def diag(self, X):  # type: ignore[no-untyped-def]
            return super().diag(X[:, DIM:])

    kernel = 1 + ConstantKernel(0.7) * Sites((2 * 0.4) ** -0.5) + ConstantKernel(0.3) * Scores(0.0)
    oracle = GaussianProcessRegressor(kernel, alpha=noise + 1e-6, optimizer=None)
    oracle.fit(columns(known), (y - SLOPE * (known.score_N - score) / deviation).numpy())
    mean, sd = oracle.predict(columns(asked), return_std=True)
    ours = predicted(gp, asked)
    np.testing.assert_allclose(ours[:, 0], mean + SLOPE * columns(asked)[:, -1], atol=1e-4)
    np.testing.assert_allclose(ours[:, 1], sd, atol=1e-4)
    np.testing.assert_allclose(ours[:, 2], np.sqrt(sd**2 + noise), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("differences", "near"), [(False, False), (True, False), (False, True)])
def test_intervals_hold_the_values_of_new_variants(differences: bool, near: bool) -> None:
    """Targets drawn from the kernel, but with other hyperparameters than the prior's medians."""
    x = described(700, differences=differences, near=near)
    truth = head(700, 700, differences=differences, near=near)
    values_K = torch.tensor([*PRIOR.values()]).double() * torch.tensor([0.5, 2, 2, 1, 0.2, 0.2, 1, 2, 0.5, 4, 1])
    covariance_NN = truth._kernel(x, x, values_K) + (values_K[0] + 1e-6) * torch.eye(700)
    y = torch.linalg.cholesky(covariance_NN) @ torch.randn(700, generator=torch.Generator().manual_seed(0)).double()
    y = y + SLOPE * x.score_N
    y = (y - y[:200].mean()) / y[:200].std()
    train, test = torch.arange(200), torch.arange(200, 700)
    gp = head(200, 200, differences=differences, near=near)
    gp.fit(x.of(train), y[:200])
    mean, sd, measurement = predicted(gp, x.of(test)).T
    error = mean - y[200:].numpy()
    assert np.corrcoef(mean, y[200:])[0, 1] > 0.5
    for level in (0.5, 0.8, 0.95):
        assert coverage(error, measurement, level) == pytest.approx(level, abs=0.07)
    assert (sd < measurement).all()


@torch.no_grad()
def test_effects_add_up_and_the_wild_type_has_none() -> None:
    x = described(3)
    double = Features(torch.tensor([0, 0]), *(getattr(x, n)[:2] for n in OF_CHANGES),
                      x.score_N[:1], x.difference_ND[:1])  # fmt: skip
    none = double.of(torch.tensor([], dtype=torch.int64))
    gp, values_K = head(3, 3), torch.tensor([*PRIOR.values()]).double()
    values_K[list(PRIOR).index("slope")] = 0
    kernel_NN = gp._kernel(x, x, values_K) - 1
    np.testing.assert_allclose(gp._kernel(double, x, values_K)[0] - 1, kernel_NN[0] + kernel_NN[1])
    assert none.count == 0
    assert torch.equal(Features.joined([x.of(torch.tensor([0])), x.of(torch.tensor([1, 2]))]).record_M, x.record_M)


def test_a_batch_has_the_features_of_its_variants() -> None:
    tokens = [encode(WT), encode(mutant("T3A:I6W"))]
    batch = pack_variants(tokens, [encode(WT)] * 2, logits_from="wild_type")
    x_TD, logits_MV = torch.randn(len(batch.tokens_T), DIM), torch.randn(2, 33)
    features = head(1, 1, differences=True, near=True).features(x_TD, batch, logits_MV)
    assert features.place_M3[:, 0].tolist() == [2, 5], "in 10 Angstrom"
    wild_LD = batch.residues(x_TD)[-1].double()
    expected = (wild_LD - wild_LD.mean(0)) / wild_LD.std(0) / DIM**0.5
    np.testing.assert_allclose(features.site_MD, expected[[2, 5]], atol=1e-5)
    assert features.record_M.tolist() == [1, 1]
    assert features.score_N[0] == 0 != features.score_N[1]
    assert features.difference_ND[0].abs().sum() == 0
    np.testing.assert_allclose(features.root_MA.square().sum(1), 1, atol=1e-6)


def test_features_must_be_numbers() -> None:
    x = described(5)
    x.site_MD[2, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"), torch.no_grad():
        head(5, 5).fit(x, torch.arange(5.0))


def test_recipes_of_this_head() -> None:
    """It is fitted to frozen weights, which is the default then, and refuses what it does not read."""
    few = recipe_file.resolve("variants")
    recipe = recipe_file.load(few, ["task.head=gp"])
    assert recipe.adapt.method == "probe"
    for keys, word in (
        (["adapt.method=lora"], "probe"),
        (["task.pool=mean"], "pool"),
        (["task.hidden=8"], "hidden"),
        (["task.loss=ranking"], "loss"),
        (["task.context=masked"], "context"),
    ):
        with pytest.raises(InputError, match=word):
            recipe_file.load(few, ["task.head=gp", *keys])
