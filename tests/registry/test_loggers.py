"""Loggers, read back by the programs that they write for."""

import importlib.util
import json

import pytest

from bflcore.cli import main
from bflcore.registry.loggers import flat

RUN = (
    "run fedavg --data synthetic --clients 3 --rounds 2 --eval-every 1 --local-epochs 1 "
    "--workers 1 --train-per-class 6 --test-per-class 6 --out run --quiet --log"
)


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Run with a logger; return the folder and the figures that metrics.jsonl holds."""
    monkeypatch.chdir(tmp_path)

    def run(name):
        with pytest.raises(SystemExit) as end:
            main([*RUN.split(), name])
        assert end.value.code == 0
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return tmp_path / "run", [flat(json.loads(line)) for line in lines]

    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")  # its own old protobuf use
def test_tensorboard_reads_every_figure_of_every_round(logged):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_multiplexer")
    folder, records = logged("tensorboard")
    events = reading.EventMultiplexer().AddRunsFromDirectory(str(folder / "tensorboard"))
    events.Reload()
    found = {
        name: [(event.step, event.value) for event in events.Scalars(".", name)]
        for name in records[0]
    }
    for name, points in found.items():
        expected = [(record["round"], pytest.approx(record[name], rel=1e-6)) for record in records]
        assert points == expected


def test_mlflow_reads_every_figure_of_every_round_in_one_run(logged, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder, records = logged("mlflow")
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert run.info.run_id == (folder / "mlflow.txt").read_text()
    assert run.info.run_name == "run"
    for name in records[0]:
        points = client.get_metric_history(run.info.run_id, name)
        expected = [(record["round"], pytest.approx(record[name])) for record in records]
        assert [(point.step, point.value) for point in points] == expected


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused_before_anything_is_written(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package: None if package == name else find(package)
    )
    with pytest.raises(SystemExit) as end:
        main([*RUN.split(), name])
    assert end.value.code == 2
    assert f"pip install 'bflcore[{name}]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
