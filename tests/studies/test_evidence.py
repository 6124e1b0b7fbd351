import json

import pytest

from bflcore.errors import RunError
from bflcore.studies.cells import Cell
from bflcore.studies.evidence import Evidence, Measured, write_record
from bflcore.studies.results import Results, Trial

METRICS = {
    "personal.accuracy": {"mean": 0.5, "std": 0.1, "pooled": 0.4},
    "personal.entropy": {"mean": 0.5, "std": 0.1, "pooled": 0.4},
}


def trial(seed, **given):
    fields = {"metrics": METRICS, "bytes": {"up": 3}, "seconds": 1.5}
    return Trial("a", seed, f"bfl run fedavg --seed {seed}", **fields | given)


def test_what_is_written_is_read_again_by_its_command(tmp_path):
    runs = [Measured(trial(seed), {"torch": "2"}, {"cores": 2}) for seed in (0, 1)]
    write_record(tmp_path / "x.json", {"failures": {}}, runs)
    found = Evidence.read(tmp_path)
    assert found.runs.keys() == {"bfl run fedavg --seed 0", "bfl run fedavg --seed 1"}
    one = found.runs["bfl run fedavg --seed 1"]
    assert (one.trial.seed, one.trial.seconds, one.machine) == (1, 1.5, {"cores": 2})
    assert one.value("personal.accuracy", "pooled") == 0.4
    assert one.value("personal.accuracy", "none") is one.value("personal.mce", "mean") is None


def test_environments_are_written_once_and_only_metrics_that_tables_show(tmp_path):
    places = [({"torch": "2"}, {}), ({"torch": "3"}, {}), ({"torch": "2"}, {})]
    runs = [Measured(trial(seed), *place) for seed, place in enumerate(places)]
    write_record(tmp_path / "x.json", {}, runs)
    written = json.loads((tmp_path / "x.json").read_text())
    assert [run["environment"] for run in written["runs"]] == [0, 1, 0]
    assert len(written["environments"]) == 2
    assert written["runs"][0]["metrics"].keys() == {"personal.accuracy"}


def test_runs_of_all_tables_in_the_folder_are_known(tmp_path):
    for seed in (0, 1):
        write_record(tmp_path / f"{seed}.json", {"failures": {}}, [Measured(trial(seed), {}, {})])
    assert len(Evidence.read(tmp_path).runs) == 2
    assert Evidence.read(tmp_path / "none").runs == {}


def test_failed_runs_are_not_known_but_remembered_until_they_succeed(tmp_path):
    known, cells = Evidence(), (Cell("a", "fedavg"),)
    known.add(Results(cells, (0, 1), (trial(0), trial(1, failure="no"))))
    assert known.failures == {trial(1).command: "no"}
    write_record(tmp_path / "x.json", {"failures": known.failures}, known.runs.values())
    again = Evidence.read(tmp_path)
    assert (again.failures, again.runs.keys()) == (known.failures, known.runs.keys())
    again.add(Results(cells, (1,), (trial(1),)))
    assert again.failures == {}
    assert [run.trial.seed for run in known.runs.values()] == [0]
    commands = {0: trial(0).command, 1: trial(1).command}
    assert list(known.by_seed(commands)) == [0]


def test_an_edited_record_is_refused(tmp_path):
    path = tmp_path / "x.json"
    write_record(path, {"failures": {}}, [Measured(trial(0), {}, {})])
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(RunError, match=r"x\.json"):
        Evidence.read(tmp_path)


def test_another_file_is_refused_in_one_line(tmp_path):
    write_record(tmp_path / "x.json", {"failures": {}}, [])
    from bflcore.experiments.integrity import write_json

    write_json(tmp_path / "y.json", {"seeds": [1]})
    with pytest.raises(RunError, match=r"y\.json does not have the form of a reproduced table"):
        Evidence.read(tmp_path)
