from pathlib import Path

import attrs
import pytest

from bflcore.data.sources import CIFAR10, MNIST
from bflcore.errors import DataError, OptionError
from bflcore.registry.loading import load_registry
from bflcore.studies import plan as planning
from bflcore.studies.paper_tables import Recipe, StandIn, read_table
from bflcore.studies.plan import base_command, fetch, missing, plan

REGISTRY = load_registry()


def one(table, row, column, **flags):
    found = plan(read_table(table), [row, column], **flags)
    return next(p for p in found if (p.row.name, p.column.name) == (row, column))


@pytest.fixture
def here(monkeypatch):
    """Say which data sets are here."""
    there = set()
    monkeypatch.setattr(
        planning,
        "missing",
        lambda data, folder=None: f"{data} is not here" if data not in there else "",
    )
    return there


def test_a_cell_has_the_flags_of_protocol_setting_and_recipe(here):
    here.add("fashion-mnist")
    cell = one("bpfed.table1", "fedavg", "fashion-mnist-small").cell
    flags = {"partition": "labels:5", "clients": 10, "train_per_class": 50, "model": "mlp"}
    assert flags.items() <= cell.flags.items()
    assert cell.options == {"inference.optimiser": "sgd", "inference.lr": 0.1}


def test_a_setting_overrides_the_recipe_which_overrides_the_protocol(here):
    here |= {"fashion-mnist", "mnist"}
    fraction = "inference.fraction"
    assert one("fedsi.figures", "fedsi", "fraction-0.05").cell.options[fraction] == 0.05
    assert one("fedsi.figures", "fedsi", "fraction-0.2").cell.options[fraction] == 0.2
    momentum = "inference.momentum"
    assert one("superfed.table1", "fedavg", "mnist-50").cell.options[momentum] == 0.9
    assert one("superfed.table1", "scaffold", "mnist-50").cell.options[momentum] == 0.0
    assert one("superfed.table1", "fedavg", "mnist-50").cell.flags["local_epochs"] == 10
    assert one("superfed.table1", "fedrep", "mnist-50").cell.flags["local_epochs"] == 1


def test_only_the_last_round_is_evaluated(here):
    here.add("fashion-mnist")
    for rounds, number in ({}, 60), ({"rounds": 7}, 7), ({"paper": True}, 800):
        planned = one("fedsi.table1", "fedper", "fashion-mnist-small", **rounds)
        assert planned.rounds == number
        assert (planned.cell.flags["rounds"], planned.cell.flags["eval_every"]) == (number, number)
        assert planned.cell.name == f"fedper_fashion-mnist-small_{number}r"


def test_a_recipe_may_train_longer_but_not_longer_than_the_paper(here):
    here.add("fashion-mnist")
    table = read_table("fedsi.table1")
    row = table.row("bpfed")
    longer = attrs.evolve(row, recipe=attrs.evolve(row.recipe, rounds=100))
    table = attrs.evolve(table, rows=(longer,))
    assert plan(table, ["fashion-mnist-small"])[0].rounds == 100
    assert plan(table, ["fashion-mnist-small"], paper=True)[0].rounds == 800


def test_a_single_round_stays_single(here):
    here.add("cifar10")
    assert one("aggregation.tables", "dwc", "iid-pretrained", rounds=5).rounds == 1


def test_data_that_are_not_here_are_replaced_by_the_stand_in(here):
    planned = one("fedsi.table1", "fedsi", "mnist-small")
    assert (planned.cell.flags["data"], planned.cell.flags["test_per_class"]) == ("mnist5k", 50)
    assert "mnist5k" in planned.stand_in
    assert "mnist5k" in planned.cell.name
    here.add("mnist")
    planned = one("fedsi.table1", "fedsi", "mnist-small")
    assert (planned.cell.flags["data"], planned.stand_in) == ("mnist", "")
    assert planned.cell.flags["test_per_class"] == 950


def test_a_stand_in_of_another_kind_of_data_is_not_comparable(here):
    assert one("fedsi.table1", "fedsi", "mnist-small").comparable
    assert not one("superfed.table5", "superfed-mm", "cifar10-start-0.4").comparable
    here.add("cifar10")
    assert one("superfed.table5", "superfed-mm", "cifar10-start-0.4").comparable


def test_a_cell_without_data_says_which_command_fetches_them(here):
    planned = one("fedsi.table1", "fedsi", "cifar10-small")
    assert planned.cell is None
    assert "bfl reproduce fedsi.table1 --only cifar10-small --download" in planned.why
    planned = one("fedsi.table1", "fedsi", "mnist-small", rounds=2, data_dir=Path("/a b"))
    command = (
        "bfl reproduce fedsi.table1 --rounds 2 --data-dir '/a b' --only mnist-small --download"
    )
    assert planned.cell is not None
    assert planned.why == f"mnist is not here; get it with: {command}"


def test_data_that_are_not_ours_to_download_say_themselves_how_to_get_them(tmp_path):
    for name, step in (("femnist", "git clone"), ("tiny-imagenet", "curl -O")):
        assert step in missing(name, tmp_path)
    why = one("superfed.table3", "fedavg", "femnist", data_dir=tmp_path).why
    assert why == missing("femnist", tmp_path)


def test_the_command_of_a_table_calls_it_as_it_was_given(tmp_path):
    path = tmp_path / "mine.toml"
    text = Path(planning.__file__).with_name("papers").joinpath("tdamp.figures.toml").read_text()
    protocols = path.with_name("protocols")
    protocols.mkdir()
    source = Path(planning.__file__).with_name("papers") / "protocols/tdamp.toml"
    (protocols / "tdamp.toml").write_text(source.read_text())
    path.write_text(text)
    assert base_command(read_table(path), 3, None) == f"bfl reproduce {path} --rounds 3"
    paper = base_command(read_table("tdamp.figures"), None, None, paper=True)
    assert paper == "bfl reproduce tdamp.figures --paper"


def test_a_method_that_is_not_installed_does_not_stop_the_others(here):
    here.add("fashion-mnist")
    table = read_table("fedsi.table1")
    recipe = Recipe("fedsi", "fedsi-of-another-distribution")
    rows = [attrs.evolve(r, recipe=recipe) if r.name == "fedsi" else r for r in table.rows]
    found = plan(attrs.evolve(table, rows=tuple(rows)), ["fashion-mnist-small"])
    assert [p.row.name for p in found if p.cell is None] == ["fedsi"]
    assert "fedsi-of-another-distribution is not installed" in found[-1].why


def test_options_that_a_method_lacks_are_left_out(here):
    here.add("mnist")
    table = read_table("superfed.table1")
    row = table.row("fedavg")
    without = attrs.evolve(row.recipe, without=("inference.momentum",))
    table = attrs.evolve(table, rows=(attrs.evolve(row, recipe=without),))
    options = plan(table, ["mnist-50"])[0].cell.options
    assert "inference.momentum" not in options
    assert options["inference.weight_decay"] == 0.0001


def test_the_folder_of_the_data_reaches_the_runs_but_not_those_of_stand_ins(here, tmp_path):
    planned = one("fedsi.table1", "fedsi", "mnist-small", data_dir=tmp_path)
    assert "data_dir" not in planned.cell.flags
    here.add("mnist")
    planned = one("fedsi.table1", "fedsi", "mnist-small", data_dir=tmp_path)
    assert planned.cell.flags["data_dir"] == str(tmp_path)


def test_data_are_looked_for_without_waiting_for_torch(tmp_path):
    assert missing("cifar10", tmp_path) == "cifar10 is not here"
    assert missing("shakespeare", tmp_path)
    assert missing("digits") == ""
    assert missing("synthetic", tmp_path) == ""


def test_data_that_are_said_to_be_here_can_be_loaded():
    for name in ("mnist5k", "boston", "digits", "fashion-mnist"):
        try:
            REGISTRY.datasets[name]().load()
        except DataError:
            assert missing(name)
        else:
            assert missing(name) == ""


def test_a_folder_with_fashion_mnist_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "DEBIAN_FASHION_MNIST", tmp_path / "none")
    place = tmp_path / "FashionMNIST" / "raw"
    place.mkdir(parents=True)
    (place / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    assert missing("fashion-mnist", tmp_path) == ""
    assert missing("fashion-mnist", place / "other")


def test_an_unknown_pattern_is_refused():
    with pytest.raises(OptionError, match="--only"):
        plan(read_table("fedsi.table1"), ["emnist"])


def test_a_stand_in_says_what_it_is():
    for name in ("fedsi.table1", "superfed.table1", "aggregation.tables", "tdamp.figures"):
        for column in read_table(name).columns:
            stand_in = column.setting.stand_in
            assert stand_in is None or (isinstance(stand_in, StandIn) and len(stand_in.says) > 20)


def test_only_data_that_are_absent_and_wanted_are_fetched(here, monkeypatch, tmp_path):
    here.add("fashion-mnist")
    asked = []
    for source in (MNIST, CIFAR10):
        monkeypatch.setattr(
            source, "load", lambda self, folder, download: asked.append((self.name, download))
        )
    table = read_table("fedsi.table1")
    planned = plan(table, ["mnist-small", "fashion-mnist-small"])
    assert fetch(planned, table, tmp_path) == ["mnist"]
    assert asked == [("mnist", True)]
    femnist = read_table("superfed.table3")
    assert fetch(plan(femnist, ["femnist"]), femnist, tmp_path) == []  # not ours to download
