"""Reading run directories: what is missing or malformed is named."""

from pathlib import Path

import attrs
import pytest
import tomli_w

from bflcore.errors import RunError
from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.environment import settings_digest
from bflcore.report.reading import Run, read_run, read_runs, well_formed


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run directory; give the folder"):
        read_run(tmp_path)


def begun(folder, *lines):
    """Write what a run leaves that was stopped after some evaluations."""
    folder.mkdir(exist_ok=True)
    settings = {"method": "fedavg", "rounds": 60}
    (folder / "experiment.toml").write_text(tomli_w.dumps(settings))
    directory = RunDirectory(folder)
    known = {"fingerprints": {"experiment.toml": settings_digest(settings)}}
    directory.write_json("environment.json", known)
    directory.write_json("evaluation.json", {})
    costs = {"seconds": {"clients": 2.0, "server": 1.0}, "bytes": {"up": 1, "down": 2}}
    for i, accuracy in enumerate(lines):
        metric = {"mean": accuracy, "std": 0.0, "pooled": accuracy}
        record = {"round": 6 * (i + 1), "personal.accuracy": metric, **costs, "dropped": []}
        directory.append(record)


def test_a_run_without_an_evaluated_round_says_how_to_continue(tmp_path):
    begun(tmp_path)
    with pytest.raises(RunError, match="no round has been evaluated; continue with: bfl resume"):
        read_run(tmp_path)


def test_an_unfinished_run_is_read_and_marked(tmp_path):
    begun(tmp_path / "cut", 0.5, 0.75)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 18, "pers')  # killed while it wrote
    run = read_run(tmp_path / "cut")
    assert run.unfinished.startswith("round 12 of 60, unfinished: continue with: bfl resume ")
    assert run.summary["final"]["personal.accuracy"]["mean"] == 0.75
    assert run.summary["seconds"]["total"] == 3


def test_a_damaged_line_that_is_not_the_last_is_an_error(tmp_path):
    begun(tmp_path, 0.5)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text("{\n" + text)
    with pytest.raises(RunError, match="cannot be read"):
        read_run(tmp_path)


def test_runs_that_cannot_be_read_are_named_and_left_out(tmp_path):
    begun(tmp_path / "good", 0.5)
    said = []
    runs = read_runs([tmp_path, tmp_path / "good", tmp_path / "none"], said.append)
    assert [run.label for run in runs] == ["good"]
    assert [str(tmp_path) in reason for reason in said] == [True, True]
    with pytest.raises(RunError, match="is not a run directory.*is not a run directory"):
        read_runs([tmp_path, tmp_path / "none"])


def test_clients_and_classes_have_the_names_of_the_data():
    clients = [{"id": "charité", "train": 3, "test": 0}, {"id": 107, "train": 3, "test": 2}]
    described = {"task": "classification", "classes": ["ill", "well"], "clients": clients}
    tested = [{"client": 1, "accuracy": 0.5}, {"client": 0, "accuracy": 0.7}]
    run = Run(Path("a"), {}, [], {}, {"personal": {"clients": tested}}, {}, described)
    assert (run.client(0), run.client(1), run.client(9)) == ("charité", "107", "9")
    assert run.class_name(1) == "well"
    assert run.untested == ["charité"]
    assert run.worst["client"] == 1
    on_nodes = attrs.evolve(run, description={"clients": [{"id": 0, "train": 0, "test": 0}]})
    assert on_nodes.untested == []


def test_runs_of_a_study_are_called_by_their_cells_and_where_these_are_alike_by_the_study(tmp_path):
    places = [f"{study}/{cell}/seed-0" for study, cell in (("s", "a"), ("s", "b"), ("t", "a"))]
    for place in (*places, "single"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        begun(tmp_path / place, 0.5)
    for place in places:
        (tmp_path / place).parent.joinpath("cell.toml").touch()
    labels = [run.label for run in read_runs([*map(tmp_path.joinpath, (*places, "single"))])]
    assert labels == ["s/a/seed-0", "b/seed-0", "t/a/seed-0", "single"]
    assert read_run(tmp_path / places[0]).label == "a/seed-0"


def test_of_many_runs_with_a_malformed_file_an_error_names_a_few():
    runs = [Run(Path(f"run{i}"), {}, [], {}, {}, {}) for i in range(24)]
    said = r"^run0, run1, run2 and 21 more runs: a file .*KeyError"
    with pytest.raises(RunError, match=said), well_formed(*runs):
        runs[0].summary["final"]
