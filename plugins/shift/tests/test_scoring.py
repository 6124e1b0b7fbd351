"""Scoring finished runs through the public API."""

import json

import numpy as np
import pytest

import bflcore
from bfl_shift.scores import labelled_scores, outcome_of
from bfl_shift.scoring import data_set, digest, held_out, score, score_once
from bfl_shift.shifts import chosen_shifts
from bflcore.data.partition import Partition
from bflcore.errors import DataError


@pytest.fixture
def run(executed):
    return executed[0].folder / "runs" / "clean.fedvi" / "seed-0"


def test_the_reference_equals_what_the_run_itself_measured(executed, run):
    final = bflcore.load(run).summary["final"]
    found = executed[1].scores["clean", "fedvi", 0]["reference"]
    for name in ("accuracy", "nll", "brier", "ece", "epistemic", "aleatoric"):
        assert found["pooled"][name] == pytest.approx(final[f"personal.{name}"]["pooled"]), name
        mean = np.mean([one[name] for one in found["clients"].values()])
        assert mean == pytest.approx(final[f"personal.{name}"]["mean"]), name
    sets = final["calibrated.set_coverage90"]["pooled"], final["calibrated.set_size90"]["pooled"]
    assert (found["pooled"]["coverage"], found["pooled"]["set_size"]) == pytest.approx(sets)
    novel = executed[1].scores["clean", "fedvi", 0]["novel-clients"]
    assert [*novel["clients"]] == ["4"]
    assert novel["pooled"]["nll"] == pytest.approx(final["novel.nll"]["pooled"])


def test_a_shifted_client_is_asked_about_its_own_shifted_samples(executed, run, tiny):
    shift = next(one for one in chosen_shifts(tiny, "rotation") if one.name == "rotation")
    tests = {n: s for n, s in held_out(run, data_set("digits")).items() if n < 4}
    asked = shift.of(tests, 2, 0)
    prediction = bflcore.load(run).client(2).predict(asked.x)
    expected = labelled_scores(outcome_of(prediction, asked.y))
    found = executed[1].scores["clean", "fedvi", 0]["rotation"]["clients"]["2"]
    assert found == expected


def test_test_samples_are_never_training_samples(run):
    partition = Partition.load(run / "partition.npz")
    images = data_set("digits").x
    trained = {image.tobytes() for rows in partition.train for image in images[rows]}
    tests = held_out(run, data_set("digits"))
    assert [*tests] == [0, 1, 2, 3, 4]
    rows = [set(rows.tolist()) for rows in (*partition.train, *partition.calibration)]
    for number, own in enumerate(partition.test):
        assert not any(set(own.tolist()) & other for other in rows), number
    assert trained  # images may repeat in the data set, rows may not


def test_scores_are_read_again_unless_they_are_of_another_run(
    executed, run, tmp_path, monkeypatch, tiny
):
    shifts = chosen_shifts(tiny, "blur")
    clean = [one for one in shifts if one.training == "clean"]
    file = tmp_path / "scores" / "seed-0.json"
    first, took = score_once(run, file, tiny, "clean", 0, clean[:1])
    assert first == score(run, tiny, "clean", 0, clean[:1])
    more, longer = score_once(run, file, tiny, "clean", 0, clean)  # adds the blur
    assert more.keys() == {"reference", "blur"}
    assert longer > took > 0
    monkeypatch.setattr("bfl_shift.scoring.score", lambda *_: pytest.fail("scored again"))
    again, same = score_once(run, file, tiny, "clean", 0, clean)
    assert (digest(again), same) == (digest(more), longer)
    other = executed[0].folder / "runs" / "clean.local" / "seed-0"
    with pytest.raises(pytest.fail.Exception, match="scored again"):
        score_once(other, file, tiny, "clean", 0, clean)


def test_a_digest_notices_the_last_bit(executed):
    scores = executed[1].scores["clean", "fedvi", 0]["blur"]
    changed = json.loads(json.dumps(scores))
    assert digest(changed) == digest(scores)
    changed["pooled"]["nll"] = float(np.nextafter(changed["pooled"]["nll"], 10))
    assert digest(changed) != digest(scores)


def test_data_that_are_no_images_are_refused():
    with pytest.raises(DataError, match=r"synthetic has samples of shape \[60\]; allowed: images"):
        data_set("synthetic")
