import json
import shlex
import shutil

import pytest

from bflcore.cli.run import resolved
from bflcore.errors import OptionError, RunError
from bflcore.experiments.integrity import read_json, write_json
from bflcore.registry.loading import load_registry
from bflcore.studies import plan as planning
from bflcore.studies import reproduce as module
from bflcore.studies.execution import Standing
from bflcore.studies.reproduce import available_tables, reproduce
from bflcore.studies.results import Results

TINY = """
title = "Tiny"
source = "nobody, Table 0"
seeds = "0-1"
rounds = { paper = 3, here = 1 }
flags = { clients = 3, local_epochs = 1, model = "mlp" }
options = { "model.hidden" = [4] }
differs = ["It is tiny."]

[settings.digits]
flags = { data = "digits" }

[settings.letters]
flags = { data = "emnist" }

[recipes.fedavg]
method = "fedavg"

[recipes.local]
method = "fedavg"
flags = { share = "none" }

[metrics.accuracy]
key = "personal.accuracy"
title = "accuracy, %"

[metrics.ECE]
key = "personal.ece"
statistic = "pooled"
title = "ECE"
scale = 1.0
better = "lower"
range = [0.0, 1.0]

[[columns]]
name = "digits"

[[columns]]
name = "digits ECE"
setting = "digits"
metric = "ECE"

[[columns]]
name = "letters"

[[rows]]
name = "fedavg"
paper = [99.9, 0.5, 50.0]
notes = { digits = "one round" }

[[rows]]
name = "alone"
recipe = "local"
paper = [1.0, "n/a", 50.0]

[[claims]]
text = "sharing is better"
column = "digits"
rows = ["fedavg"]
than_rows = ["alone"]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run the whole table once; return its folder and what was returned."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planning,
            "missing",
            lambda data, folder=None: f"{data} is not here" if data == "emnist" else "",
        )
        places = {"out": folder / "out", "runs": folder / "runs"}
        return folder, reproduce(folder / "tiny.toml", jobs=1, **places)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    monkeypatch.setattr(
        planning,
        "missing",
        lambda data, folder=None: f"{data} is not here" if data == "emnist" else "",
    )
    places = {"out": tmp_path / "out", "runs": tmp_path / "runs", "jobs": 1}
    return lambda *only, **given: reproduce(path, only, **(places | given))


@pytest.fixture
def asked(monkeypatch):
    """Record which runs are asked for, and run none."""
    asked = []

    def nothing(cells, seeds, folder, **_):
        asked.extend((cell.name, seed) for seed in seeds for cell in cells)
        return Results(tuple(cells), tuple(seeds), ())

    monkeypatch.setattr(module, "execute", nothing)
    return asked


def of(found, row, column):
    return next(
        one
        for one in found.cells
        if (one.planned.row.name, one.planned.column.name) == (row, column)
    )


def test_a_table_is_run_and_written_beside_the_papers_numbers(finished):
    folder, found = finished
    one = of(found, "fedavg", "digits")
    paths = [folder / f"runs/tiny/fedavg_digits_1r/seed-{n}/summary.json" for n in (0, 1)]
    finals = [json.loads(path.read_text())["final"] for path in paths]
    ours = [100 * final["personal.accuracy"]["mean"] for final in finals]
    assert list(one.ours.values()) == ours
    ece = [final["personal.ece"]["pooled"] for final in finals]
    assert list(of(found, "fedavg", "digits ECE").ours.values()) == ece
    page = (folder / "out/tiny.md").read_text()
    assert f"| {sum(ours) / 2:.2f} ± " in page
    assert "* **fedavg, digits**" in page
    assert "One round." in page
    name = folder / "tiny.toml"
    assert f"* letters: emnist is not here; get it with: bfl reproduce {name} --only lett" in page
    assert f"\nbfl reproduce {name}\n" in page
    record = json.loads((folder / "out/tiny.json").read_text())
    assert len(record["runs"]) == 4  # two methods, two seeds; both columns show the same runs
    assert record["environments"][0]["versions"]["torch"]
    assert found.claims[0].seeds == 2


def test_a_second_time_nothing_is_run_even_without_the_run_directories(
    finished, tiny, tmp_path, asked
):
    folder, found = finished
    shutil.copytree(folder / "out", tmp_path / "out")
    again = tiny()
    assert asked == []
    assert [one.ours for one in again.cells] == [one.ours for one in found.cells]
    pages = [(place / "out/tiny.md").read_text() for place in (tmp_path, folder)]
    assert pages[0].replace(str(tmp_path), str(folder)) == pages[1]


def test_the_command_that_is_printed_repeats_the_run(finished):
    folder, _ = finished
    record = json.loads((folder / "out/tiny.json").read_text())
    words = shlex.split(record["runs"][0]["command"])[3:]
    assert words[-2:] == ["--seed", "0"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    options = (given.pop("-o"),)
    flags = {name.strip("-").replace("-", "_"): value for name, value in given.items()}
    numbers = {name: int(v) if v.isdigit() else v for name, v in flags.items()}
    experiment = resolved(load_registry(), "fedavg", options, **numbers)
    assert (experiment.run.rounds, experiment.model.hidden) == (1, (4,))


def test_pages_are_written_again_without_running_anything(finished, tiny, tmp_path, asked):
    folder, _ = finished
    shutil.copytree(folder / "out", tmp_path / "out")
    (tmp_path / "out/tiny.md").unlink()
    tiny(seeds="0-9", pages=True)
    assert asked == []
    assert "| 0, 1 | 1 |" in (tmp_path / "out/tiny.md").read_text()


def test_runs_of_other_settings_stay_in_the_record(finished, tiny, tmp_path, asked):
    folder, found = finished
    shutil.copytree(folder / "out", tmp_path / "out")
    for given in ({"rounds": 2}, {"paper": True}):
        other = tiny("fedavg", pages=True, **given)
        assert (other.runs, other.kept) == ((), 4)
        page = (tmp_path / "out/tiny.md").read_text()
        assert "4 runs of other settings are kept in `tiny.json`." in page
    again = tiny(pages=True)
    assert [one.ours for one in again.cells] == [one.ours for one in found.cells]
    assert again.kept == 0


def test_runs_that_another_process_has_recorded_meanwhile_are_kept(
    finished, tiny, tmp_path, monkeypatch
):
    def meanwhile(cells, seeds, folder, **_):
        shutil.copytree(finished[0] / "out", tmp_path / "out")
        return Results(tuple(cells), tuple(seeds), ())

    monkeypatch.setattr(module, "execute", meanwhile)
    found = tiny("fedavg", seeds="7")
    assert list(of(found, "alone", "digits").ours) == [0, 1]
    assert len(json.loads((tmp_path / "out/tiny.json").read_text())["runs"]) == 4


def recorded(path, change):
    """Change every run of a record."""
    values = read_json(path)
    for run in values["runs"]:
        change(run)
    write_json(path, values)


def test_runs_whose_settings_have_another_digest_are_repeated(finished, tiny, tmp_path, asked):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    recorded(tmp_path / "out/tiny.json", lambda run: run.update(settings="of another default"))
    found = tiny("fedavg", seeds="0")
    assert asked == [("fedavg_digits_1r", 0)]
    assert (of(found, "fedavg", "digits").ours, found.kept) == ({}, 4)


def test_runs_of_a_record_without_digests_are_trusted_and_counted(finished, tiny, tmp_path, asked):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    recorded(tmp_path / "out/tiny.json", lambda run: run.pop("settings"))
    found = tiny()
    assert asked == []
    assert list(of(found, "fedavg", "digits").ours) == [0, 1]
    text = "For 4 of them the record has the command alone"
    assert text in (tmp_path / "out/tiny.md").read_text()


def test_finished_runs_are_taken_over_from_their_folder(finished, tiny, tmp_path):
    folder, whole = finished
    shutil.copytree(folder / "runs", tmp_path / "runs")
    found = tiny(pages=True)
    assert [one.ours for one in found.cells] == [one.ours for one in whole.cells]
    assert all(run.settings for run in found.runs)
    shutil.rmtree(tmp_path / "out")
    kept = tmp_path / "runs/tiny/fedavg_digits_1r/cell.toml"
    kept.write_text(kept.read_text().replace("lr = ", "lr = 1"))
    found = tiny(pages=True)
    assert of(found, "fedavg", "digits").ours == {}
    assert list(of(found, "alone", "digits").ours) == [0, 1]


def test_where_the_data_are_does_not_make_other_runs(finished, tiny, tmp_path, asked):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    found = tiny(data_dir=tmp_path)
    assert asked == []
    assert list(of(found, "fedavg", "digits").ours) == [0, 1]


def test_a_table_may_show_any_metric_and_runs_without_it_are_repeated(tiny, tmp_path, monkeypatch):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("personal.accuracy", "personal.balanced_accuracy"))
    first = tiny("fedavg", seeds="0")
    shutil.rmtree(tmp_path / "runs")
    asked = []
    monkeypatch.setattr(
        module,
        "execute",
        lambda cells, seeds, *_, **__: asked.append(seeds) or Results((), (), ()),
    )
    again = tiny("fedavg", seeds="0")
    assert (of(again, "fedavg", "digits").ours, asked) == (of(first, "fedavg", "digits").ours, [])

    def forget(run):  # as earlier versions did
        del run["metrics"]["personal.balanced_accuracy"]

    recorded(tmp_path / "out/tiny.json", forget)
    tiny("fedavg", seeds="0")
    assert asked == [[0]]


def test_only_selects_rows_and_columns(tiny, asked):
    tiny("alone", seeds="0")
    tiny("fedavg,digits", seeds=[3])
    assert asked == [("local_digits_1r", 0), ("fedavg_digits_1r", 3)]
    asked.clear()
    tiny("letters")
    assert asked == []  # the data are not here


def test_the_page_says_what_was_given_and_how_to_run_the_rest(tiny, asked, tmp_path):
    given = {"seeds": [0, 2], "rounds": 2, "data_dir": tmp_path}
    tiny("alone,fedavg", "digits", **given)
    page = (tmp_path / "out/tiny.md").read_text()
    base = f"bfl reproduce {tmp_path}/tiny.toml --rounds 2 --data-dir {tmp_path}"
    assert f"```\n{base} --only alone --only fedavg --only digits --seeds 0,2\n```" in page
    assert f"`{base} --only 'digits ECE'`" in page


def test_other_rounds_are_other_runs(tiny, asked):
    tiny("fedavg", seeds="0", rounds=2)
    tiny("fedavg", seeds="0", paper=True)
    assert asked == [("fedavg_digits_2r", 0), ("fedavg_digits_3r", 0)]


def test_what_was_measured_stays_on_the_page_when_something_else_is_run(
    finished, tiny, tmp_path, asked
):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    found = tiny("alone", seeds="7")
    assert asked == [("local_digits_1r", 7)]
    assert list(of(found, "fedavg", "digits").ours) == [0, 1]
    assert of(found, "alone", "digits").missing == (7,)


def test_an_interrupted_table_continues_to_the_same_numbers(finished, tiny, tmp_path):
    folder, whole = finished
    # What is left of a run: its directory, finished, and no record of it.
    kept = "runs/tiny/fedavg_digits_1r"
    shutil.copytree(folder / kept, tmp_path / kept)
    shutil.rmtree(tmp_path / kept / "seed-1")
    began = []
    found = tiny("fedavg", progress=lambda standing: began.append(standing.ended))
    assert [name for name in began if name] == ["fedavg_digits_1r/seed-1"]
    assert of(found, "fedavg", "digits").ours == of(whole, "fedavg", "digits").ours


def test_all_batches_are_told_as_one(finished, tiny, tmp_path, monkeypatch):
    shutil.copytree(finished[0] / "out", tmp_path / "out")

    def fail(cells, seeds, *_, progress, **__):
        names = [f"{cell.name}/seed-{seed}" for cell in cells for seed in seeds]
        progress(Standing(0, len(names), 0, ()))
        for done, name in enumerate(names, 1):
            progress(Standing(done, len(names), done, (), 99.0, name, "no"))
        return Results(tuple(cells), tuple(seeds), ())

    monkeypatch.setattr(module, "execute", fail)
    record = tmp_path / "out/tiny.json"
    values = read_json(record)
    values["runs"] = [run for run in values["runs"] if run["seed"] or "none" in run["command"]]
    write_json(record, values)
    seen = []
    tiny(seeds="0,1,7", progress=seen.append)  # of seed 0 one cell is due, of seed 7 two
    assert [(at.done, at.failed, at.total) for at in seen] == [(n, n, 3) for n in range(4)]
    assert seen[0].left is None
    assert [seen[1].left > 0, seen[-1].left] == [True, 0]


def test_the_page_shows_each_run_as_soon_as_it_has_ended(tiny, tmp_path, monkeypatch):
    whole = module.execute

    def interrupted(*given, progress, **named):
        def stop(standing):
            progress(standing)
            if standing.ended:
                raise KeyboardInterrupt

        return whole(*given, progress=stop, **named)

    monkeypatch.setattr(module, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny("fedavg")
    assert "| 0 | 1 |" in (tmp_path / "out/tiny.md").read_text()  # seed 0, one round


def test_a_run_that_fails_is_named_and_the_others_go_on(tiny, tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace('flags = { share = "none" }', "flags = { lr = 1e30 }"))
    found = tiny(seeds="0")
    assert list(of(found, "fedavg", "digits").ours) == [0]
    assert len(found.failures) == 1
    assert "* failed: `bfl run fedavg" in (tmp_path / "out/tiny.md").read_text()


def test_nothing_is_written_for_a_mistake(tiny, tmp_path):
    path = tmp_path / "tiny.toml"
    for given, error in (
        ({"rounds": 2, "paper": True}, "--paper and --rounds exclude each other"),
        ({"seeds": "4-0"}, "--seeds"),
    ):
        with pytest.raises(OptionError, match=error):
            tiny(**given)
    path.write_text(TINY.replace("local_epochs = 1", "local_epoch = 1"))
    with pytest.raises(OptionError, match="unknown flag 'local_epoch'"):
        tiny()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "runs").exists()


def test_a_damaged_record_is_refused(finished, tiny, tmp_path):
    shutil.copytree(finished[0] / "out", tmp_path / "out")
    record = tmp_path / "out/tiny.json"
    record.write_text(record.read_text()[:-20])
    with pytest.raises(RunError, match=r"tiny\.json"):
        tiny("fedavg", seeds="0")


def test_installed_tables_are_listed_with_what_can_be_run_here(monkeypatch):
    monkeypatch.setattr(
        planning,
        "missing",
        lambda data, folder=None: f"{data} is not here" if data != "mnist5k" else "",
    )
    listed = {one.table.name: one for one in available_tables()}
    one = listed["fedsi.table1"]
    assert (one.here, one.stand_ins, one.cells) == (12, 12, 72)
    step = "get it with: bfl reproduce fedsi.table1 --only"
    assert one.reasons == (
        f"mnist is not here; {step} mnist-small --download",
        f"fashion-mnist is not here; {step} fashion-mnist-small --download",
        f"cifar10 is not here; {step} cifar10-small --download",
    )
    assert listed["superfed.table2"].here == 0
