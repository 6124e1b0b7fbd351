"""What single runs found: by seed, and by client."""

import attrs
import pytest

from bflcore import RunError
from bflcore.experiments.integrity import write_json
from bflcore.studies.trials import final_metrics, of_clients, values_of

from .quick import trial


def test_final_metrics_are_those_with_a_mean_over_clients():
    metric = {"mean": 1.0, "std": 0.0, "pooled": 2.0}
    final = {"round": 3, "train.loss": 0.1, "clients": {"all": 3}, "personal.nll": metric}
    assert final_metrics({"final": final}) == {"personal.nll": metric}


def test_values_by_seed_leave_out_runs_without_the_metric():
    trials = [trial("a", 0, personal__nll=1.5), trial("a", 1), trial("a", 2, personal__nll=0.0)]
    assert values_of(trials, "personal.nll") == {0: 1.5, 2: 0.0}
    assert values_of(trials, "personal.nll", "pooled") == {0: 2.5, 2: 1.0}


def test_clients_are_read_from_the_runs_folder(tmp_path):
    marks = {"the data or its partition": "abc"}
    write_json(tmp_path / "environment.json", {"fingerprints": marks})
    clients = [{"client": 0, "nll": 1.0}, {"client": 1}, {"client": 2, "nll": 3.0}]
    write_json(tmp_path / "evaluation.json", {"validation.novel": {"clients": clients}})
    run = attrs.evolve(trial("a", 0), path=tmp_path)
    assert of_clients(run, "validation.novel.nll") == ("abc", {0: 1.0, 2: 3.0})
    assert of_clients(run, "personal.nll") == ("abc", {})
    write_json(tmp_path / "environment.json", {})
    with pytest.raises(RunError, match="does not have the files that a run writes"):
        of_clients(run, "personal.nll")
    with pytest.raises(RunError, match="is not here: clients are compared in the runs' own"):
        of_clients(attrs.evolve(run, path=tmp_path / "gone"), "personal.nll")
