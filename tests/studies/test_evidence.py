import json

import attrs
import pytest
import tomli_w

from bflcore.errors import RunError
from bflcore.experiments.integrity import write_json
from bflcore.studies.cells import Cell
from bflcore.studies.evidence import (
    Evidence,
    Measured,
    plain_command,
    settings_digest,
    stored_digest,
    writing_record,
)
from bflcore.studies.results import Results, Trial

METRICS = {
    "personal.accuracy": {"mean": 0.5, "std": 0.1, "pooled": 0.4},
    "personal.f1": {"mean": 0.5, "std": 0.1, "pooled": 0.4},
}
NEW = {"mean": 0.25, "std": 0.1, "pooled": 0.4}


def trial(seed, **given):
    fields = {"metrics": METRICS, "bytes": {"up": 3}, "seconds": 1.5}
    return Trial("a", seed, f"bfl run fedavg --seed {seed}", **fields | given)


def measured(seed, settings="", **given):
    return Measured(trial(seed, **given), {"torch": "2"}, {"cores": 2}, settings)


def evidence(*runs):
    found = Evidence()
    for run in runs:
        found.put(run)
    return found


def executed(folder, seed, lr, **environment):
    """Return a run whose folder says where it was made, with which settings."""
    path = folder / "a" / f"seed-{seed}"
    path.mkdir(parents=True, exist_ok=True)
    (folder / "a" / "cell.toml").write_text(tomli_w.dumps({"lr": lr}))
    write_json(path / "environment.json", environment)
    return trial(seed, path=path)


def test_what_is_written_is_read_again_by_its_command(tmp_path):
    evidence(measured(0), measured(1, "s")).write(tmp_path / "x.json", {})
    found = Evidence.read(tmp_path)
    assert found.runs.keys() == {"bfl run fedavg --seed 0", "bfl run fedavg --seed 1"}
    one = found.find("bfl run fedavg --seed 1", "s")
    assert (one.trial.seed, one.trial.seconds, one.machine) == (1, 1.5, {"cores": 2})
    assert one.value("personal.accuracy", "pooled") == 0.4
    assert one.value("personal.accuracy", "none") is one.value("personal.mce", "mean") is None


def test_environments_are_written_once_and_all_metrics_are_kept(tmp_path):
    places = [({"torch": "2"}, {}), ({"torch": "3"}, {}), ({"torch": "2"}, {})]
    found = evidence(*(Measured(trial(seed), *place) for seed, place in enumerate(places)))
    found.write(tmp_path / "x.json", {})
    written = json.loads((tmp_path / "x.json").read_text())
    assert [run["environment"] for run in written["runs"]] == [0, 1, 0]
    assert len(written["environments"]) == 2
    assert written["runs"][0]["metrics"] == METRICS


def test_runs_of_all_tables_in_the_folder_are_known(tmp_path):
    for seed in (0, 1):
        evidence(measured(seed)).write(tmp_path / f"{seed}.json", {})
    assert len(Evidence.read(tmp_path).runs) == 2
    assert Evidence.read(tmp_path / "none").runs == {}


def test_failed_runs_are_not_known_but_remembered_until_they_succeed(tmp_path):
    known, cells = Evidence(), (Cell("a", "fedavg"),)
    fine = executed(tmp_path, 0, 0.1)
    known.add(Results(cells, (0, 1), (fine, trial(1, failure="no"))))
    assert known.failures == {trial(1).command: "no"}
    known.write(tmp_path / "x.json", {})
    again = Evidence.read(tmp_path)
    assert (again.failures, again.runs.keys()) == (known.failures, known.runs.keys())
    again.add(Results(cells, (1,), (executed(tmp_path, 1, 0.1),)))
    assert again.failures == {}
    assert [run.trial.seed for run in known] == [0]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_failure_of_which_another_table_has_the_finished_run_is_forgotten(tmp_path, order):
    failed = Evidence(failures={trial(0).command: "no"})
    for name, found in zip(order, (failed, evidence(measured(0))), strict=True):
        found.write(tmp_path / f"{name}.json", {})
    assert Evidence.read(tmp_path).failures == {}


def test_each_run_has_its_own_versions_machine_and_settings(tmp_path):
    first = executed(tmp_path / "x", 0, 0.1, torch="2", machine={"cores": 2}, warnings=["no"])
    second = executed(tmp_path / "y", 1, 0.2, torch="3", machine={"cores": 8})
    known = Evidence()
    known.add(Results((Cell("a", "fedavg"),), (0, 1), (first, second), ({"torch": "1"},), {}))
    found = [(run.versions, run.machine, run.settings) for run in known]
    assert found == [
        ({"torch": "2"}, {"cores": 2}, settings_digest({"lr": 0.1})),
        ({"torch": "3"}, {"cores": 8}, settings_digest({"lr": 0.2})),
    ]


def test_runs_of_one_command_with_other_settings_are_other_runs():
    known = evidence(measured(0, "then"), measured(0, "now", metrics={"personal.f1": NEW}))
    command = trial(0).command
    assert known.find(command, "then").value("personal.f1", "mean") == 0.5
    assert known.find(command, "now").value("personal.f1", "mean") == 0.25
    assert known.find(command, "later") is None


def test_a_run_without_a_digest_is_trusted_until_the_same_run_has_one():
    known, command = evidence(measured(0)), trial(0).command
    assert known.find(command, "now").settings == ""
    known.put(attrs.evolve(measured(0, "now"), machine={}))
    assert [run.settings for run in known] == ["now"]
    assert known.find(command, "now").machine == {"cores": 2}  # as was recorded
    known.put(measured(0))
    assert len([*known]) == 1


def test_a_run_without_a_digest_and_another_one_are_both_kept():
    known = evidence(measured(0), measured(0, "now", metrics=METRICS | {"personal.f1": NEW}))
    assert len([*known]) == 2
    assert known.find(trial(0).command, "now").settings == "now"


def test_where_the_data_are_is_no_part_of_a_command_nor_of_the_settings(tmp_path):
    command = "bfl run fedavg --data mnist --data-dir '/a b' --rounds 3"
    assert plain_command(command) == "bfl run fedavg --data mnist --rounds 3"
    assert plain_command("bfl run fedavg -o 'a.b=1, 2'") == "bfl run fedavg -o 'a.b=1, 2'"
    settings = {"lr": 0.1, "data": {"data": "mnist", "data_dir": "/a"}}
    assert settings_digest(settings) == settings_digest({"lr": 0.1, "data": {"data": "mnist"}})
    assert settings_digest(settings) != settings_digest({"lr": 0.1, "data": {"data": "boston"}})
    (tmp_path / "cell.toml").write_text(tomli_w.dumps(settings))
    assert stored_digest(tmp_path) == settings_digest(settings)
    assert stored_digest(tmp_path / "none") == ""


def test_a_record_is_read_again_and_locked_while_it_is_written(tmp_path):
    path = tmp_path / "new" / "x.json"
    with writing_record(path) as record:
        record.put(measured(0))
        record.write(path, {})
    with writing_record(path) as record:
        assert [run.trial.seed for run in record] == [0]


def test_an_edited_record_is_refused(tmp_path):
    path = tmp_path / "x.json"
    evidence(measured(0)).write(path, {})
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(RunError, match=r"x\.json"):
        Evidence.read(tmp_path)


def test_another_file_is_refused_in_one_line(tmp_path):
    Evidence().write(tmp_path / "x.json", {})
    write_json(tmp_path / "y.json", {"seeds": [1]})
    with pytest.raises(RunError, match=r"y\.json does not have the form of a reproduced table"):
        Evidence.read(tmp_path)
