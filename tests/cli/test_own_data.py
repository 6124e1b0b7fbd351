"""A hospital's table, from the file to predictions with names and uncertainties."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import bflcore
from bflcore.cli import main
from bflcore.experiments.directory import RunDirectory

from ..interrupted import Killed, same, stopped_at

SIZES = {"charité": 420, "ukb": 260, "mercy": 120, "lmu": 80, "st-anna": 40, "107": 20, "west": 9}
SIZES["hut"] = 1
LEARNS = ("-o", "inference.prior_sigma=1", "--lr", "0.02", "--eval-every", "3")
SMALL = ("--model", "mlp", "-o", "model.hidden=8", "--workers", "1")


def patients(path, rows=None):
    """Write 950 patients of 8 hospitals: strings, missing values, a column of scale 1e5."""
    rng = np.random.default_rng(0)
    hospital = rng.permutation(np.repeat([*SIZES], [*SIZES.values()]))
    age, bnp = rng.normal(60, 15, 950), rng.normal(1e5, 3e4, 950)
    sex = rng.choice(["f", "m"], 950)
    risk = (age - 60) / 15 + (bnp - 1e5) / 3e4 + (sex == "m") + 0.3 * rng.normal(size=950)
    outcome = np.select([risk > 3, risk > 0.5], ["severe", "mild"], "none")
    outcome[(outcome == "severe") & (hospital != "ukb")] = "mild"  # a class of one hospital
    gone = rng.random((2, 950)) < 0.1
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "sex", "icu", "bnp", "hospital", "outcome"])
        for i in range(950 if rows is None else rows):
            table.writerow([
                "" if gone[0, i] else f"{age[i]:.1f}",
                "NA" if gone[1, i] else sex[i],
                "yes" if age[i] > 70 else "no",
                f"{bnp[i]:.0f}",
                hospital[i],
                outcome[i],
            ])  # fmt: skip
    return outcome


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_from_a_table_to_predictions_in_three_commands(bfl, tmp_path):
    outcome = patients(tmp_path / "patients.csv")
    words = ("--target", "outcome", "--client", "hospital", "--rounds", "3", *LEARNS, *SMALL)
    code, out, err = bfl("run", "fedvi", "--data", "patients.csv", *words, "--out", "run")
    assert code == 0, err
    lines = err.splitlines()
    assert "warning: clients without test samples, which are not evaluated: hut" in lines
    said = "task: classification of 3 classes (column outcome: mild, none, severe)"
    assert said in lines
    assert any(
        line.startswith("partition: natural, the 8 owners are the clients") for line in lines
    )
    (tmp_path / "patients.csv").unlink()

    # Columns in another order, without the target, with one that the model does not know.
    (tmp_path / "new.csv").write_text(
        "zip,icu,bnp,sex,age\n10115,yes,190000,m,88\n80331,no,40000,f,\n20095,no,41000,unknown,31\n",
        encoding="utf-8",
    )
    code, out, err = bfl("predict", "run", "new.csv", "--client", "charité", "--out", "p.csv")
    assert (code, out) == (0, "predictions: p.csv\n")
    assert err == (
        "note: columns that the model does not know are ignored: zip\n"
        "note: column sex: no training sample has unknown; such values count as none of the known\n"
    )
    found = rows_of(tmp_path / "p.csv")
    names = ["probability_mild", "probability_none", "probability_severe"]
    assert list(found[0])[:4] == ["label", *names]
    assert [row["label"] == "none" for row in found] == [False, True, True]
    for row in found:
        assert sum(float(row[name]) for name in names) == pytest.approx(1)
        assert float(row["epistemic"]) > 0

    assert bfl("export", "run", "--client", "107", "--to", "m.safetensors")[0] == 0
    assert bfl("predict", "m.safetensors", "new.csv", "--out", "q.csv")[0] == 0
    assert len(rows_of(tmp_path / "q.csv")) == 3

    evaluated = json.loads((tmp_path / "run" / "evaluation.json").read_text())["personal"]
    by_id = {entry["id"]: entry for entry in evaluated["clients"]}
    assert by_id.keys() == SIZES.keys() - {"hut"}
    most = max(np.mean(outcome == name) for name in set(outcome))
    assert evaluated["pooled"]["accuracy"] > most + 0.1  # a constant is right in so many cases
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "st-anna" in report
    assert "charité" in report
    run = bflcore.load(tmp_path / "run")
    assert set(run.clients) == {*SIZES}
    assert run.client("charité").size == round(420 * 0.8)


README = Path(__file__).parents[2] / "README.md"  # the manual's pages: tests/manual


def test_the_commands_of_the_readme_run(bfl, tmp_path):
    patients(tmp_path / "patients.csv", rows=60)
    lines = (tmp_path / "patients.csv").read_text(encoding="utf-8").replace("charité", "charite")
    for name in ("patients.csv", "new.csv"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    block = re.search(r"```bash\n(bfl run \w+ --data patients.csv.*?)```", text, re.DOTALL)
    commands = [line.split()[1:] for line in block[1].splitlines()]
    assert [words[0] for words in commands] == ["run", "predict", "export"]
    for words in commands:
        quick = ("--rounds", "1", *SMALL) if words[0] == "run" else ()
        code, _, err = bfl(*words, *quick)
        assert code == 0, err
    found = rows_of(tmp_path / "predictions.csv")
    assert {row["label"] for row in found} <= {"mild", "none", "severe"}


def test_a_run_on_a_table_continues_to_the_bit_from_another_folder(bfl, tmp_path, monkeypatch):
    patients(tmp_path / "patients.csv", rows=120)
    words = [
        *("run", "fedvi", "--data", "patients.csv", "--target", "outcome", "--client", "hospital"),
        *("--rounds", "3", "--eval-every", "1", "--quiet", *SMALL),
    ]
    assert bfl(*words, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        stopped_at(patch, (RunDirectory, "append"), 1)
        with pytest.raises(Killed):
            main([*words, "--out", "cut"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert bfl("resume", "../cut", "--quiet")[0] == 0
    same(tmp_path / "cut", tmp_path / "whole")


def test_a_folder_of_tables_needs_no_column_of_owners(bfl, tmp_path):
    patients(tmp_path / "patients.csv")
    header, *lines = (tmp_path / "patients.csv").read_text(encoding="utf-8").splitlines()
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for owner in ("ukb", "lmu", "107"):
        own = [line for line in lines if f",{owner}," in line]
        (folder / f"{owner}.csv").write_text("\n".join([header, *own]) + "\n", encoding="utf-8")
    flags = ("--target", "outcome", "--drop", "hospital", "--rounds", "1", *SMALL)
    assert bfl("run", "fedavg", "--data", "hospitals", *flags, "--out", "run")[0] == 0
    assert bflcore.load(tmp_path / "run").clients == ["107", "lmu", "ukb"]
    assert bflcore.load(tmp_path / "run").client(107).id == "107"


FILES = {
    "days.csv": "age,days\n" + "".join(f"{i},{i % 29}\n" for i in range(60)),
    "dates.csv": "age,seen,outcome\n" + "".join(f"{i},2024-01-31,{i % 2}\n" for i in range(60)),
    "names.csv": "patient,age,outcome\n" + "".join(f"Mrs {i},{i},{i % 2}\n" for i in range(60)),
    "gaps.csv": "age,outcome\n" + "".join(f"{i},{i % 2 or ''}\n" for i in range(60)),
}

MISTAKES = {
    "no-target": (("--data", "days.csv"), "--target is missing: the column to predict; days.csv"),
    "no-column": (("--data", "days.csv", "--target", "day"), "no column 'day'; it has age, days"),
    "dates": (("--data", "dates.csv", "--target", "outcome"), "leave it out: --drop seen"),
    "names": (("--data", "names.csv", "--target", "outcome"), "leave it out: --drop patient"),
    "gaps": (("--data", "gaps.csv", "--target", "outcome"), "missing in 30 samples (the first is"),
    "count": (
        ("--data", "days.csv", "--target", "days", "--task", "count"),
        "--task: 'count' is not allowed; allowed: classification | regression",
    ),
    "no-file": (("--data", "absent.csv"), "absent.csv does not exist; give a file .csv"),
    "excel": (("--data", "a.xlsx"), "or your own data: a file .npz, .csv, .tsv or .parquet"),
    "built-in": (("--data", "digits", "--target", "y"), "--target is for your own data"),
    "nonsense": (
        ("--data", "days.csv", "--target", "days", "-o", "dataset.nonsense=1"),
        "unknown option 'dataset.nonsense' (did you mean dataset.standardise?)",
    ),
    "own-model": (
        ("--model", "math:hypot", "-o", "model.hidden=3"),
        "model.hidden: model math:hypot has no options",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_next_step(bfl, tmp_path, mistake):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words, message = MISTAKES[mistake]
    code, out, err = bfl("run", "fedavg", *words, *SMALL[-2:], "--out", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def test_days_are_amounts_unless_they_are_said_to_be_labels(bfl, tmp_path):
    (tmp_path / "days.csv").write_text(FILES["days.csv"])
    words = ("run", "fedavg", "--data", "days.csv", "--target", "days", "--rounds", "1", *SMALL)
    _, _, err = bfl(*words, "--clients", "2", "--out", "run")
    said = (
        "task: regression on column days (29 different whole numbers; --task classification takes"
    )
    assert said in err
    _, _, err = bfl(*words, "--clients", "2", "--task", "classification", "--out", "classes")
    assert "task: classification of 29 classes (column days: 0, 1, 2, 3, 4, ...); --task reg" in err
