"""What a run reports: counters that survive an interruption, and the round that is called best."""

import json

import attrs
import pytest
import torch

from bflcore.errors import ClientError
from bflcore.experiments.records import Records
from bflcore.messages import Evaluation
from bflcore.problem import metrics
from bflcore.problem.ood import ood_sums
from bflcore.registry.loggers import flat
from bflcore.rounds import Round


def evaluation(client, hits, total=10, shared=None, **more):
    """Return an evaluation in which so many of the predictions are right."""
    labels = torch.zeros(total, dtype=torch.int64)
    certain = torch.tensor([[0.9, 0.1]] * hits + [[0.2, 0.8]] * (total - hits))
    sums = metrics.classification_sums(certain[None], labels)
    return Evaluation(client, sums, shared and sums, **more)


def done(*dropped):
    return Round(None, 0.5, (0, 1), dropped, 10, 20, 1.5, 0.25)


def evaluated(records, number, *hits, novel=()):
    replies = [evaluation(client, n) for client, n in enumerate(hits)]
    return records.add_evaluation(number, 0.5, {}, replies, novel)


def test_groups_of_clients_have_metrics_of_their_own():
    record = evaluated(Records("m"), 1, 10, 5, 2, novel={2})
    assert record["personal.accuracy"] == pytest.approx({"mean": 0.75, "std": 0.25, "pooled": 0.75})
    assert record["novel.accuracy"]["mean"] == pytest.approx(0.2)
    assert not any(key.startswith("global.") for key in record)


def test_costs_add_up_and_a_dropped_client_is_reported_once():
    records = Records("m")
    records.add_round(1, done(ClientError(7, "fit", "late")))
    records.add_round(2, done())
    first = evaluated(records, 2, 5)
    second = evaluated(records, 3, 5)
    assert first["bytes"] == {"up": 20, "down": 40}
    assert first["seconds"] == {"clients": 3.0, "server": 0.5, "evaluation": 0.0}
    expected = {"round": 1, "client": 7, "stage": "fit", "reason": "late"}
    assert (first["dropped"], second["dropped"]) == ([expected], [])
    assert records.summary()["dropped"] == [expected]


def test_clients_have_the_ids_of_their_owners():
    records = Records("m", ids=(900, "ukb"))
    records.add_round(1, done(ClientError(1, "fit", "late")))
    record = evaluated(records, 2, 5, 3)
    named = [(entry["client"], entry["id"]) for entry in records.evaluation["personal"]["clients"]]
    assert named == [(0, 900), (1, "ukb")]
    assert record["dropped"][0]["id"] == "ukb"


def test_a_client_whose_evaluation_failed_is_reported_and_left_out():
    replies = [evaluation(0, 4), ClientError(1, "evaluate", "dark")]
    record = Records("m").add_evaluation(1, 0.5, {}, replies, ())
    assert record["personal.accuracy"]["pooled"] == pytest.approx(0.4)
    assert [(entry["client"], entry["stage"]) for entry in record["dropped"]] == [(1, "evaluate")]


def test_records_restored_from_a_checkpoint_continue_as_if_nothing_had_happened():
    whole, cut = Records("m"), Records("m")
    for records in (whole, cut):
        records.add_round(1, done(ClientError(7, "fit", "late")))
        evaluated(records, 1, 5)
        records.add_round(2, done(ClientError(8, "fit", "late")))
    state, lines = json.loads(json.dumps([cut.state(), cut.records]))
    resumed = Records("m")
    resumed.restore(state, lines)
    for records in (whole, resumed):
        evaluated(records, 2, 6)
    one, other = ({**records.summary(), "seconds": None} for records in (whole, resumed))
    assert one == other
    assert resumed.records == whole.records


def test_the_summary_keeps_the_final_round_and_the_best_apart():
    records = Records("m")
    for number, hits in ((1, 4), (2, 9), (3, 6)):
        evaluated(records, number, hits)
    summary = records.summary()
    assert summary["final"]["round"] == summary["rounds"] == 3
    assert summary["best"]["round"] == 2
    assert "chosen on test data" in summary["best"]["chosen"]


def validated(records, number, hits, held):
    """Add an evaluation of three clients, the last of which is novel."""
    replies = [evaluation(client, n, shared=True) for client, n in enumerate(hits)]
    replies += [
        evaluation(client, n, 5, shared=client < 2, validation=True)
        for client, n in enumerate(held)
    ]
    return records.add_evaluation(number, 0.5, {}, replies, {2})


def test_validation_samples_have_metrics_of_their_own():
    records = Records("m")
    record = validated(records, 1, (10, 5, 1), (4, 2, 5))
    pooled = {key: value["pooled"] for key, value in record.items() if key.endswith(".accuracy")}
    assert pooled == pytest.approx(
        {
            "personal.accuracy": 0.75,
            "global.accuracy": 0.75,
            "novel.accuracy": 0.1,
            "validation.accuracy": 0.6,
            "validation.global.accuracy": 0.6,
            "validation.novel.accuracy": 1.0,
        }
    )
    clients = records.evaluation["validation"]["clients"]
    assert [(entry["client"], entry["examples"]) for entry in clients] == [(0, 5), (1, 5)]
    assert records.evaluation["validation.novel"]["clients"][0]["accuracy"] == 1
    assert records.summary()["final"]["validation.accuracy"] == record["validation.accuracy"]


def test_the_best_round_is_chosen_on_validation_samples_where_there_are_any():
    records = Records("m")
    for number, hits, held in ((1, 9, 2), (2, 5, 5), (3, 6, 4)):
        validated(records, number, (hits,) * 3, (held,) * 3)
    best = records.summary()["best"]
    assert best["round"] == 2
    assert best["chosen"] == (
        "the evaluated round with the best validation.accuracy, chosen on validation data"
    )


def test_curves_of_validation_samples_are_kept_apart():
    records, sums = Records("m"), evaluation(0, 4, 5).personal
    curves = {"lambda": {0.0: sums, 1.0: sums}}
    replies = [
        evaluation(0, 10, curves={"lambda": {0.0: evaluation(0, 10).personal}}),
        evaluation(0, 4, 5, curves=curves, validation=True),
    ]
    records.add_evaluation(1, 0.5, {}, replies, ())
    assert records.evaluation["curves"]["lambda"]["values"] == [0.0]
    assert records.evaluation["validation.curves"]["lambda"]["pooled"]["accuracy"] == [0.8, 0.8]


def test_calibrated_models_have_metrics_of_their_own():
    records = Records("m")
    replies = [
        attrs.evolve(evaluation(client, 5), calibrated=evaluation(client, hits).personal)
        for client, hits in ((0, 8), (1, 6), (2, 1))
    ]
    record = records.add_evaluation(1, 0.5, {}, replies, {2})
    assert record["calibrated.accuracy"]["mean"] == pytest.approx(0.7)
    assert record["novel.calibrated.accuracy"]["mean"] == pytest.approx(0.1)
    assert [c["client"] for c in records.evaluation["calibrated"]["clients"]] == [0, 1]


def test_foreign_samples_have_metrics_of_their_own_and_both_histograms_are_kept():
    records = Records("m")
    sums = [ood_sums(torch.tensor([0.1, low]), torch.tensor([0.8, 0.9])) for low in (0.2, 0.85)]
    replies = [evaluation(client, 5, ood=one) for client, one in enumerate(sums)]
    record = records.add_evaluation(1, 0.5, {}, replies, ())
    assert record["ood.auroc"] == pytest.approx({"mean": 0.875, "std": 0.125, "pooled": 0.875})
    assert record["ood.fpr95"]["mean"] == pytest.approx(0.25)
    kept = records.evaluation["ood"]
    assert [entry["auroc"] for entry in kept["clients"]] == pytest.approx([1, 0.75])
    scores = kept["scores"]
    assert (sum(scores["own"]), sum(scores["foreign"])) == (4, 4)
    assert len(scores["own"]) == len(scores["borders"]) + 1


def test_the_classes_of_all_clients_are_kept_together():
    records = Records("m")
    evaluated(records, 1, 10, 5)
    kept = records.evaluation["personal"]
    assert kept["confusion"] == [[15, 5], [0, 0]]
    assert kept["classes"][0]["recall"] == 0.75
    assert "recall" not in kept["classes"][1]


def test_a_line_has_a_few_metrics_of_each_client_that_loggers_leave_alone():
    records = Records("fedavg")
    replies = [evaluation(3, 7), evaluation(5, 10), evaluation(9, 1)]
    line = records.add_evaluation(1, 0.5, {}, replies, novel=(9,))
    assert line["by_client"]["client"] == [3, 5]
    assert line["by_client"]["accuracy"] == [0.7, 1.0]
    assert set(line["by_client"]) == {"client", "accuracy", "nll"}
    assert not any(name.startswith("by_client") for name in flat(line))
    assert "by_client" not in records.summary()["final"]


def test_at_most_two_hundred_clients_are_followed_in_every_line():
    records = Records("fedavg")
    line = records.add_evaluation(1, 0.5, {}, [evaluation(i, 5) for i in range(300)], novel=())
    assert line["by_client"]["client"] == [*range(200)]
