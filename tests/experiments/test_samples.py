"""The test samples that a run keeps: which ones, of whose data, and how large they are."""

import base64
import io
import json

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from bflcore.api import runs
from bflcore.data.sources import DATASETS
from bflcore.data.user import OwnData
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.samples import EACH, LARGEST, kept, telling_samples
from bflcore.problem.likelihoods import Predictive
from bflcore.registry.loading import load_registry

SMALL = {"clients": 2, "rounds": 2, "local_epochs": 3, "workers": 1, "train_per_class": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on images of a public data set, whose method fine-tunes before it predicts."""
    out = tmp_path_factory.mktemp("runs") / "run"
    runs.run("fedavg", data="digits", out=out, **SMALL)
    return out


def expected(folder):
    """Return (entropy, probabilities, label) of every test sample, from the stored models."""
    experiment = resolve(
        load_registry(), "fedavg", runs.resolve.read(folder / "experiment.toml"), {}
    )
    problem, loaded, found = prepare(experiment).problem, runs.load(folder), {}
    for client in problem.clients:
        x, y = problem.test.of(client)
        p = loaded.client(client).predict(x.numpy()).probabilities.double().numpy()
        entropy = -(p * np.log(np.maximum(p, 1e-12))).sum(1)
        for i, label in enumerate(y.tolist()):
            found[client, i] = (entropy[i], p[i], label)
    return found, problem


def test_they_are_those_a_reader_of_the_stored_models_finds(folder):
    samples, (truth, _) = json.loads((folder / "samples.json").read_text()), expected(folder)
    assert samples["examined"] == len(truth) < 2000
    names = [(one["client"], one["sample"]) for one in samples["unsure"]]
    assert names == sorted(truth, key=lambda name: -truth[name][0])[:EACH]
    wrong = [name for name, (_, p, label) in truth.items() if p.argmax() != label]
    surest = sorted(wrong, key=lambda name: -truth[name][1].max())[:EACH]
    assert [(one["client"], one["sample"]) for one in samples["wrong"]] == surest
    for one in samples["unsure"] + samples["wrong"]:
        entropy, p, label = truth[one["client"], one["sample"]]
        assert one["label"] == label
        assert one["entropy"] == pytest.approx(entropy, abs=1e-4)
        classes = [c for c, _ in one["predicted"]]
        assert classes == list(np.argsort(-p)[:3])
        assert [q for _, q in one["predicted"]] == pytest.approx(p[classes], abs=1e-4)


def test_a_picture_shows_its_sample(folder):
    samples, (_, problem) = json.loads((folder / "samples.json").read_text()), expected(folder)
    for one in samples["unsure"]:
        image = Image.open(io.BytesIO(base64.b64decode(one["picture"])))
        x = problem.test.of(one["client"])[0][one["sample"], 0].numpy()
        assert np.abs(np.asarray(image) / 255 - x).max() <= 0.5 / 255 + 1e-6


def test_large_images_become_small_pictures_and_the_file_stays_small():
    class Sure:
        def predict(self, problem, broadcast, cohort, x):
            p = torch.zeros(1, 1, x.shape[1], 10)
            p[..., 0] = 1.0
            return Predictive(p)

    class Round:
        round = 3

    given = {"data": {"data": "digits", "clients": 2}}
    problem = prepare(resolve(load_registry(), "fedavg", {}, given)).problem
    noise = torch.rand(len(problem.test.x), 3, 200, 100, generator=torch.Generator().manual_seed(0))
    problem = attrs.evolve(problem, test=attrs.evolve(problem.test, x=2 * noise - 1))
    found = telling_samples(problem, Sure(), Round(), problem.clients, lambda _: {})
    assert len(found["wrong"]) == EACH
    for one in found["wrong"]:
        image = Image.open(io.BytesIO(base64.b64decode(one["picture"])))
        assert image.size == (LARGEST // 2, LARGEST)
        assert image.mode == "RGB"
    assert len(json.dumps(found)) < 400_000


def test_a_client_whose_model_is_elsewhere_or_fails_is_passed_over():
    class Failing:
        def predict(self, problem, broadcast, cohort, x):
            raise ValueError("of a plugin")

    class Round:
        round = 3

    given = {"data": {"data": "digits", "clients": 2}}
    problem = prepare(resolve(load_registry(), "fedavg", {}, given)).problem
    for memory in (None, {}):
        assert telling_samples(problem, Failing(), Round(), (0, 1), lambda _, m=memory: m) is None


def test_only_public_data_are_kept_unless_the_user_says_so(tmp_path):
    x = np.random.default_rng(0).random((60, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 3)
    given = {"data": str(tmp_path / "own.npz"), "clients": 2, "rounds": 1, "workers": 1}
    runs.run("fedavg", out=tmp_path / "auto", **given)
    assert not (tmp_path / "auto" / "samples.json").exists()
    runs.run("fedavg", out=tmp_path / "yes", keep_samples="yes", **given)
    assert len(json.loads((tmp_path / "yes" / "samples.json").read_text())["unsure"]) == EACH
    runs.run("fedavg", data="digits", out=tmp_path / "no", keep_samples="no", **SMALL)
    assert not (tmp_path / "no" / "samples.json").exists()


def test_every_data_set_by_name_is_public_and_a_users_own_is_not():
    assert {source.name for source in DATASETS if not source.public} == {OwnData.name}
    own = resolve(load_registry(), "fedavg", {}, {"data": {"data": "x.npz"}})
    assert not kept(own)


def test_tables_keep_predictions_without_pictures_and_regressions_nothing(tmp_path):
    given = {"clients": 2, "rounds": 1, "workers": 1}
    runs.run("fedavg", data="synthetic", partition="natural", out=tmp_path / "table", **given)
    found = json.loads((tmp_path / "table" / "samples.json").read_text())
    assert {one["picture"] for one in found["unsure"]} == {""}
    runs.run("fedavg", data="boston", out=tmp_path / "regression", **given)
    assert not (tmp_path / "regression" / "samples.json").exists()
