"""scikit-learn's estimators: its own checks, groups as clients, and what it builds on top."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

import bflcore
from bflcore import BayesianFederatedClassifier, BayesianFederatedRegressor

# None of scikit-learn's checks fails; a check that must be excepted is named here with its reason.
EXCEPTIONS: dict[str, str] = {}
QUICK = {"rounds": 6, "random_state": 0}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [BayesianFederatedClassifier(**QUICK), BayesianFederatedRegressor(**QUICK)],
    expected_failed_checks=lambda _: EXCEPTIONS,
)
def test_scikit_learns_own_checks_pass(estimator, check):
    check(estimator)


def hospitals(samples=60, seed=0):
    """Return samples of three hospitals that code the same two classes the other way round."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(["north", "south", "west"], samples)
    x = rng.normal(size=(len(owner), 2))
    y = np.where((x[:, 0] > 0) == (owner != "south"), "ill", "well")
    return x, y, owner


def test_each_group_is_a_client_with_a_model_of_its_own():
    x, y, owner = hospitals()
    model = BayesianFederatedClassifier("fedavg", flags={"share": "none"}, **QUICK)
    model.fit(x, y, groups=owner)
    assert model.classes_.tolist() == ["ill", "well"]
    assert model.clients_.tolist() == ["north", "south", "west"]
    new, truth, of = hospitals(seed=1)
    assert (model.predict(new, groups=of) == truth).mean() > 0.9
    for name in ("north", "south", "west"):  # a row's prediction depends on its own group alone
        rows = of == name
        alone = model.predict_proba(new[rows], groups=of[rows])
        assert np.allclose(model.predict_proba(new, groups=of)[rows], alone, atol=1e-12)


def test_a_row_of_an_unknown_group_gets_the_mixture_of_the_clients_models():
    x, y, owner = hospitals()
    keep = np.r_[0:60, 60:90, 120:140]  # 60, 30 and 20 samples
    model = BayesianFederatedClassifier("fedper", **QUICK)
    model.fit(x[keep], y[keep], groups=owner[keep])
    each = [model.predict_proba(x, groups=np.full(len(x), g)) for g in model.clients_]
    mixture = (60 * each[0] + 30 * each[1] + 20 * each[2]) / 110
    assert np.allclose(model.predict_proba(x), mixture, atol=1e-12)
    assert np.allclose(model.predict_proba(x, groups=["east"] * len(x)), mixture, atol=1e-12)


def test_a_row_of_an_unknown_group_gets_the_servers_model_where_it_is_complete():
    x, y, owner = hospitals()
    model = BayesianFederatedClassifier("ditto", **QUICK).fit(x, y, groups=owner)
    server = model.predict_proba(x, groups=["east"] * len(x))
    assert np.array_equal(server, model.predict_proba(x))
    averaged = BayesianFederatedClassifier("fedavg", **QUICK).fit(x, y, groups=owner)
    assert np.allclose(averaged.predict_proba(x), averaged.predict_proba(x, groups=owner))
    personal = model.predict_proba(x, groups=owner)
    assert not np.allclose(personal, server, atol=0.05)


def test_a_mixtures_deviation_is_that_of_the_mixture():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2))
    owner = np.repeat([1, 2], (60, 30))
    y = x[:, 0] * 3 + 50 * owner
    model = BayesianFederatedRegressor("fedvi", flags={"share": "none"}, **QUICK)
    model.fit(x, y, groups=owner)
    each = [model.predict(x, return_std=True, groups=np.full(90, g)) for g in (1, 2)]
    mean, std = model.predict(x, return_std=True)
    # Monte Carlo: draws of the two models' Gaussians in the proportion of their samples.
    means, stds = (np.stack(values) for values in zip(*each, strict=True))
    which = (rng.random((200_000, 1)) < 1 / 3).astype(int)
    drawn = means[which[:, 0], :5] + stds[which[:, 0], :5] * rng.normal(size=(200_000, 5))
    assert np.allclose(mean[:5], drawn.mean(0), rtol=0.01)
    assert np.allclose(std[:5], drawn.std(0), rtol=0.01)


def test_predictions_are_as_good_as_those_of_linear_models():
    x, y = load_iris(return_X_y=True)
    train, test = np.arange(150) % 2 == 0, np.arange(150) % 2 == 1
    model = BayesianFederatedClassifier("bpfed", random_state=0).fit(x[train], y[train])
    linear = LogisticRegression(max_iter=1000).fit(x[train], y[train])
    assert model.score(x[test], y[test]) > linear.score(x[test], y[test]) - 0.06
    x, y = make_regression(200, 5, noise=10, random_state=0)
    y = 1e4 + y  # in the units of the targets
    train = np.arange(200) < 120
    regressor = BayesianFederatedRegressor("fedavg", rounds=40, random_state=0)
    regressor.fit(x[train], y[train])
    ridge = BayesianRidge().fit(x[train], y[train])
    assert regressor.score(x[~train], y[~train]) > 0.9 * ridge.score(x[~train], y[~train])


def test_several_targets_are_predicted_in_their_shape_and_units():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    y = np.stack([x[:, 0] * 1000, 5 + x[:, 1]], 1)
    model = BayesianFederatedRegressor("fedavg", rounds=30, random_state=0).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == (80, 2)
    assert np.corrcoef(mean[:, 0], y[:, 0])[0, 1] > 0.9
    assert 100 < std[:, 0].mean() < 1000
    assert 0.1 < std[:, 1].mean() < 1


def test_pipelines_searches_and_cross_validation_work():
    x, y, owner = hospitals(30)
    model = BayesianFederatedClassifier("fedavg", rounds=2, random_state=0)
    search = GridSearchCV(
        make_pipeline(PolynomialFeatures(2), model),
        {"bayesianfederatedclassifier__options": [{"inference.lr": 0.01}, {"inference.lr": 0.1}]},
        cv=2,
    ).fit(x, y)
    assert search.predict(x).shape == y.shape
    found = cross_val_predict(model, x, y, params={"groups": owner}, cv=2, method="predict_proba")
    assert found.shape == (90, 2)
    scores = cross_val_score(model, x, y, groups=owner, cv=GroupKFold(3))
    assert np.isfinite(scores).all()


def test_a_fitted_estimator_survives_pickling_and_a_clone_is_not_fitted():
    x, y, owner = hospitals(20)
    model = BayesianFederatedClassifier("fedper", **QUICK).fit(x, y, groups=owner)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict_proba(x, owner), model.predict_proba(x, owner))
    assert not hasattr(clone(model), "classes_")


def test_a_seed_decides_the_fit_and_none_draws_another():
    x, y, _ = hospitals(20)

    def fitted(seed):
        quick = BayesianFederatedClassifier("fedvi", rounds=2, random_state=seed)
        return quick.fit(x, y).predict_proba(x)

    assert np.array_equal(fitted(3), fitted(3))
    assert not np.array_equal(fitted(3), fitted(4))
    assert np.array_equal(fitted(np.random.RandomState(1)), fitted(np.random.RandomState(1)))
    assert not np.array_equal(fitted(None), fitted(None))


def test_features_are_scaled_unless_switched_off():
    x, y, _ = hospitals()
    small = x * np.array([1e-5, 1]) + np.array([0.0, 1000.0])
    y = np.where(x[:, 0] > 0, "ill", "well")
    quick = {"method": "fedavg", "rounds": 10, "random_state": 0}
    scaled = BayesianFederatedClassifier(**quick).fit(small, y)
    assert scaled.score(small, y) > 0.9
    raw = BayesianFederatedClassifier(**quick, standardise=False).fit(small, y)
    assert raw.score(small, y) < 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "fedavgg"}, "unknown method 'fedavgg'.*did you mean fedavg"),
        ({"flags": {"clients": 3}}, "flags: clients is not allowed for an estimator"),
        ({"flags": {"seed": 3}}, "flags: seed is not allowed for an estimator"),
        ({"flags": {"test_fraction": 0.1}}, "flags: test_fraction is not allowed"),
        ({"flags": {"local_epoch": 1}}, "unknown flag 'local_epoch'.*did you mean local_epochs"),
        ({"options": {"lr": 1}}, "-o: 'lr=1' is not allowed"),
        ({"rounds": 0}, "--rounds: 0 is not allowed"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    x, y, _ = hospitals(5)
    with pytest.raises(bflcore.OptionError, match=message) as error:
        BayesianFederatedClassifier(**arguments).fit(x, y)
    assert "\n" not in str(error.value)


def test_groups_of_another_length_are_refused():
    x, y, owner = hospitals(5)
    model = BayesianFederatedClassifier("fedavg", rounds=1)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(x, y, groups=owner[1:])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(x, y, groups=owner).predict(x, groups=owner[1:])
    with pytest.raises(TypeError, match="sample_weight"):
        model.fit(x, y, sample_weight=np.ones(len(y)))
