"""The table: what it keeps, and which tables fit beside each other."""

import attrs
import numpy as np
import pytest

from bfl_shift.table import Table, table_of
from bflcore.errors import OptionError, RunError


def test_a_table_is_read_as_it_was_written(table, tmp_path):
    path = tmp_path / "bfl-shift.json"
    table.write(path)
    assert Table.read(path) == table
    assert len(path.read_text().splitlines()) < len(table.records) + 20  # a line per record


def test_means_are_over_clients_and_worse_off_is_compared_with_training_alone(executed, table):
    found = executed[1].scores
    record = next(r for r in table.records if (r.method, r.shift) == ("fedvi", "rotation"))
    clients = found["clean", "fedvi", 0]["rotation"]["clients"]
    alone = found["clean", "local", 0]["rotation"]["clients"]
    mean = np.mean([one["nll"] for one in clients.values()])
    assert record.mean["nll"] == pytest.approx(mean, rel=1e-5)
    worse = np.mean([clients[n]["accuracy"] < alone[n]["accuracy"] for n in clients])
    assert record.mean["worse_off"] == pytest.approx(worse, rel=1e-5)
    assert worse > 0  # two rounds of a shared Gaussian
    for one in table.records:
        assert ("worse_off" in one.mean) == (one.method != "local" and not one.foreign)
        assert one.foreign == (one.shift == "ood-digits")


def test_values_are_found_by_shift_and_score(table):
    assert table.values("blur", "auroc") == {}
    found = table.values("blur", "nll", "pooled")
    assert found.keys() == {"fedvi", "local"}
    assert found["local"].keys() == {0}


def test_methods_that_are_equal_to_the_bit_are_found(table):
    assert table.equal == []
    copies = [attrs.evolve(r, method="copy") for r in table.records if r.method == "local"]
    assert attrs.evolve(table, records=(*table.records, *copies)).equal == [("local", "copy")]


def test_a_table_takes_the_methods_that_it_lacks_from_another(table):
    own = attrs.evolve(table, records=tuple(r for r in table.records if r.method == "local"))
    assert own.methods == ("local",)
    both = own.beside(table)
    assert set(both.methods) == {"local", "fedvi"}
    assert len(both.records) == len(table.records)


def test_a_table_of_another_setting_or_without_a_seed_or_shift_is_refused(table):
    with pytest.raises(OptionError, match="of the setting large, this run of toy; add --setting"):
        table.beside(attrs.evolve(table, setting="large"))
    with pytest.raises(OptionError, match="it has no seed 0; allowed: "):
        table.beside(attrs.evolve(table, seeds=(1, 2)))
    with pytest.raises(OptionError, match="it has no shift blur; allowed: --shifts"):
        table.beside(attrs.evolve(table, shifts=tuple(s for s in table.shifts if s != "blur")))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}'])
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "bfl-shift.json"
    path.write_text(content)
    with pytest.raises(RunError, match="bfl-shift.json.*give a bfl-shift.json that bfl shift"):
        Table.read(path)


def test_a_missing_and_an_edited_file_are_refused(table, tmp_path):
    path = tmp_path / "bfl-shift.json"
    with pytest.raises(RunError, match="does not exist; give a bfl-shift.json"):
        Table.read(path)
    table.write(path)
    path.write_text(path.read_text().replace('"fedvi"', '"fedavg"'))
    with pytest.raises(RunError, match="does not match its digest"):
        Table.read(path)


def test_a_table_without_a_score_says_why(executed):
    asked, found, _ = executed
    nothing = attrs.evolve(found, scores={}, missing=(("clean", "local", 0, "no memory"),))
    with pytest.raises(RunError, match="the first failed because: no memory"):
        table_of(asked, nothing, "")
