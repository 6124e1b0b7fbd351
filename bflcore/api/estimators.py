"""scikit-learn's interface: estimators that train a method on arrays, a client per group.

    model = BayesianFederatedClassifier("bpfed").fit(X, y, groups=hospital)
    model.predict_proba(X_new, groups=hospital_new)

Needs scikit-learn; `bflcore` imports this module when one of the two classes is first used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from bflcore.api.flags import resolve_flags
from bflcore.api.runs import Run
from bflcore.data.base import Dataset
from bflcore.data.partition import Partition
from bflcore.errors import OptionError
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import assemble
from bflcore.experiments.run import execute
from bflcore.options import options_of
from bflcore.options.settings import DataSettings
from bflcore.options.text import value_text
from bflcore.registry.loading import load_registry

if TYPE_CHECKING:
    from bflcore.api.model import ClientModel

__all__ = ["BayesianFederatedClassifier", "BayesianFederatedRegressor"]

Array = Any  # of numpy, or what it converts
Weighted = tuple[float, "ClientModel"]


class _Federated(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """What both estimators share: parameters, training, and the choice of a row's model."""

    def __init__(
        self,
        method: str = "fedvi",
        *,
        rounds: int = 20,
        options: Mapping[str, object] | None = None,
        flags: Mapping[str, object] | None = None,
        standardise: bool = True,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.rounds = rounds
        self.options = options
        self.flags = flags
        self.standardise = standardise
        self.device = device
        self.random_state = random_state

    def _train(self, X: Array, y: Array, classes: int, groups: Array | None) -> None:
        """Train on `X` ``[N, F]``, `y` ``[N]`` labels or ``[N, T]`` targets; keep the models."""
        if groups is None:
            groups = np.zeros(len(X), np.int64)
        else:
            check_consistent_length(X, groups)
        self.clients_, owner = np.unique(column_or_1d(groups), return_inverse=True)
        parts = tuple(np.flatnonzero(owner == k) for k in range(len(self.clients_)))
        task: Literal["classification", "regression"] = (
            "classification" if classes else "regression"
        )
        dataset = Dataset("samples", task, X, y, classes, standardise=bool(self.standardise))
        registry = load_registry()
        options = [f"{name}={value_text(value)}" for name, value in (self.options or {}).items()]
        experiment = resolve_flags(registry, self.method, {}, self._flags(len(parts)), options)
        nothing = np.empty(0, np.int64)
        prepared = assemble(experiment, dataset, Partition(parts, (nothing,) * len(parts)))
        with TemporaryDirectory(prefix="bfl-") as folder:
            directory = RunDirectory.create(Path(folder) / "run", prepared, registry)
            execute(prepared, directory)
            run = Run(directory.path)
            self._models = [run.client(number) for number in range(len(parts))]
            complete = not prepared.problem.layout.personal_total
            self._server = run.server if complete and len(parts) > 1 else None

    def _flags(self, clients: int) -> dict[str, Any]:
        """Return the flags of ``bfl run``. Raises `OptionError` for one that has no effect here."""
        own = {
            "rounds": self.rounds,
            "seed": self._seed(),
            "device": self.device,
            "data": "samples.npz",
            "clients": clients,
        }
        given = dict(self.flags or {})
        for name in given:
            if name in own or name in {option.name for option in options_of(DataSettings)}:
                raise OptionError(
                    f"flags: {name} is not allowed for an estimator; its parameters, X, y and "
                    "groups take the place of data flags, rounds, seed (random_state) and device"
                )
        rare = {"eval_every": self.rounds, "checkpoint_every": self.rounds}
        return {"dtype": "float64", "workers": 1, **rare, **given, **own}

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _by_model(
        self, X: Array, groups: Array | None
    ) -> Iterator[tuple[Array, list[tuple[float, Any]]]]:
        """Yield row numbers ``[B]``, and these rows' weighted predictions."""
        if groups is None:
            yield np.arange(len(X)), [(w, m.predict(X)) for w, m in self._of_anybody()]
            return
        check_consistent_length(X, groups)
        number = {client: k for k, client in enumerate(self.clients_.tolist())}
        owners, owner = np.unique(column_or_1d(groups), return_inverse=True)
        for k, name in enumerate(owners.tolist()):
            rows = np.flatnonzero(owner == k)
            known = name in number
            models = [(1.0, self._models[number[name]])] if known else self._of_anybody()
            yield rows, [(w, model.predict(X[rows])) for w, model in models]

    def _of_anybody(self) -> list[Weighted]:
        """Return the models, with weights that sum to 1, for a row whose client is not known."""
        if self._server is not None:
            return [(1.0, self._server)]
        total = sum(model.size for model in self._models)
        return [(model.size / total, model) for model in self._models]

    def _samples(self, X: Array) -> Array:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float32, reset=False)


class BayesianFederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
    """Train a method on labelled samples, one client per group.

    Parameters
    ----------
    method : name of a method (``bfl list method``)
    rounds : number of rounds of federated training
    options : options of components, as ``-o`` has them: ``{"inference.kl_weight": 0.3}``
    flags : other flags of ``bfl run``, with underscores: ``{"local_epochs": 3, "share": "body"}``
    standardise : scale features (and real targets) by sums over the clients' samples
    device : ``cpu``, ``cuda`` or ``cuda:N``
    random_state : seed of the run; None or a RandomState draws one

    Without `groups`, `fit` has a single client. A row of a client that was trained is predicted by
    that client's own model. Other rows, and all rows if no groups are given, are predicted by the
    server's model; where that is incomplete (clients keep a part to themselves), by the mixture of
    all clients' models, weighted by their numbers of training samples. `sample_weight` is not
    supported. Networks have float64 parameters unless `flags` says otherwise; mistakes in `method`,
    `options` or `flags` raise `OptionError`.

    Attributes: `classes_` ``[C]``, `clients_` (the sorted groups), `n_features_in_`.
    """

    def fit(self, X: Array, y: Array, groups: Array | None = None) -> Self:
        """Train on `X` ``[N, F]`` with labels `y` ``[N]``; `groups` ``[N]`` names the clients.

        Raises `ValueError` for other data, or for a single class.
        """
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has 1 class; a classifier needs at least two")
        self._train(X, labels.astype(np.int64), len(self.classes_), groups)
        return self

    def predict_proba(self, X: Array, groups: Array | None = None) -> Array:
        """Return the probabilities ``[N, C]`` of the `classes_`, for samples ``[N, F]``."""
        X = self._samples(X)
        found = np.empty((len(X), len(self.classes_)))
        for rows, predictions in self._by_model(X, groups):
            found[rows] = sum(w * p.probabilities.cpu().numpy() for w, p in predictions)
        return found

    def predict(self, X: Array, groups: Array | None = None) -> Array:
        """Return the most probable of the `classes_` ``[N]``, for samples ``[N, F]``."""
        probabilities = self.predict_proba(X, groups)
        return self.classes_[probabilities.argmax(1)]


class BayesianFederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """Train a method on samples with real targets, one client per group.

    Parameters, and the choice of a row's model, are those of `BayesianFederatedClassifier`.
    Attributes: `clients_` (the sorted groups), `n_features_in_`.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Array, y: Array, groups: Array | None = None) -> Self:
        """Train on `X` ``[N, F]``, targets `y` ``[N]`` or ``[N, T]``; `groups` ``[N]`` are clients.

        Raises `ValueError` for other data.
        """
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        y = check_array(y, dtype=np.float32, ensure_2d=False, input_name="y")
        self._single = y.ndim == 1
        self._train(X, y.reshape(len(y), -1), 0, groups)
        return self

    def predict(self, X: Array, return_std: bool = False, groups: Array | None = None) -> Array:
        """Return the means of the targets ``[N]`` or ``[N, T]``, for samples ``[N, F]``.

        With `return_std`, also return their standard deviations: noise and parameters together, in
        units of the targets.
        """
        X = self._samples(X)
        shape = (len(X), self._models[0].description.outputs)
        mean, variance = np.empty(shape), np.empty(shape)
        for rows, predictions in self._by_model(X, groups):
            parts = [(w, p.mean.cpu().numpy(), p.std.cpu().numpy()) for w, p in predictions]
            mean[rows] = centre = sum(w * m for w, m, _ in parts)
            variance[rows] = sum(w * (s**2 + (m - centre) ** 2) for w, m, s in parts)
        if self._single:
            mean, variance = mean[:, 0], variance[:, 0]
        return (mean, np.sqrt(variance)) if return_std else mean
