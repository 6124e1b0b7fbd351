"""``bfl list``, ``bfl list-plugins`` and ``bfl show``."""

import json

import pytest


def test_listings_answer(bfl):
    status, out, _ = bfl("list", "method", "--json")
    assert status == 0
    assert {"bpfed", "fedavg", "fedvi"} <= {one["name"] for one in json.loads(out)["method"]}
    status, out, _ = bfl("show", "inference", "variational")
    assert "inference.kl_weight = 1.0  (float) [at least 0]" in out
    assert "Blundell" in out
    status, out, _ = bfl("matrix", "--json")
    rows = json.loads(out)
    averaged = [r for r in rows if r["aggregator"] == "average"]
    refused = {(r["inference"], r["hyper"]) for r in averaged if not r["fits"]}
    assert ("map", "empirical-bayes") in refused
    assert ("variational", "empirical-bayes") not in refused
    for command in ("list-plugins", "matrix", "list"):
        assert bfl(command)[0] == 0


def test_a_kind_may_be_named_in_the_plural(bfl):
    for plural, kind in (("methods", "method"), ("likelihoods", "likelihood")):
        assert bfl("list", plural) == bfl("list", kind)
        assert bfl("list", plural)[0] == 0
    assert bfl("show", "methods", "fedavg") == bfl("show", "method", "fedavg")


def test_settings_are_listed_and_explained(bfl):
    assert "settings\n  run " in bfl("list")[1]
    assert set(json.loads(bfl("list", "settings", "--json")[1])["settings"][0]) == {
        "name", "aliases", "distribution", "summary"
    }  # fmt: skip
    _, text, _ = bfl("show", "settings", "run")
    assert "--rounds = 100  (int) [at least 1 and at most 1e+06]\n      number of rounds" in text
    assert "--train-per-class = none  (int or none)" in bfl("show", "settings", "data")[1]
    status, _, err = bfl("show", "settings", "rum")
    assert (status, "did you mean run?" in err) == (2, True)


def test_a_method_is_shown_with_its_parts_and_what_it_sets(bfl):
    _, text, _ = bfl("show", "method", "fedsi")
    lines = [line.split() for line in text.splitlines()]
    assert ["inference", "subnetwork-laplace"] in lines
    assert ["prior_variance", "=", "0.1"] in lines
    assert ["rounds", "60"] in lines
    assert not any("fraction" in line for line in lines)  # the part's own default
    found = json.loads(bfl("show", "method", "fedsi", "--json")[1])
    assert found["parts"]["hyper"] == {"name": "continual", "options": {"zero_variance": 0.0}}
    assert (found["share"], found["settings"]) == ("body", {"rounds": 60})


@pytest.mark.parametrize("command", [["list"], ["list-plugins"], ["matrix"]])
def test_lists_are_whole_lines_when_the_terminal_is_narrow(bfl, command, monkeypatch):
    wide = bfl(*command)[1]
    monkeypatch.setenv("COLUMNS", "20")
    assert bfl(*command)[1] == wide


def test_a_calibrators_options_are_shown_as_they_are_set(bfl):
    status, out, _ = bfl("show", "calibrator", "ood")
    assert status == 0
    assert "calibrator.ood.share = 0.95" in out
    words = ("--calibration-fraction", "0.2", "-o", "calibrator.ood.share=2")
    assert "calibrator.ood.share: 2.0 is not allowed" in bfl("run", "fedavg", *words)[2]
