"""The benchmark end to end: what is trained, what is kept, what is missing."""

import attrs
import pytest

from bfl_shift.benchmark import Benchmark, chosen_methods
from bfl_shift.shifts import chosen_shifts, shifts_of
from bflcore.errors import DataError, OptionError


def test_three_trainings_serve_all_shifts_of_a_method(executed, tiny):
    asked, found, said = executed
    assert len(asked.cells()) == 2 * 3
    assert found.missing == ()
    scored = {name for scores in found.scores.values() for name in scores}
    assert scored == shifts_of(tiny).keys()
    assert [line.partition(",")[0] for line in said] == [
        f"scored: {number} of 6 runs" for number in range(1, 7)
    ]
    assert said[-1] == "scored: 6 of 6 runs, 0 s left"


def test_how_far_all_seeds_are_is_said_first_and_what_scoring_took_is_kept(tmp_path, tiny):
    asked = Benchmark(tiny, ("local",), chosen_shifts(tiny, "label-noise"), (0, 1), tmp_path)
    standings = []
    found = asked.execute(1, standings.append, lambda _: None)
    assert (standings[0].done, standings[0].total, standings[0].ended) == (0, 4, "")
    assert standings[-1].done == 4
    (early,) = {one.left for one in standings if one.done == 1 and one.ended}
    assert early > 0  # of the three others, of both seeds
    assert found.scoring.keys() == {
        f"{training}.local/seed-{seed}" for training in ("clean", "label-noise") for seed in (0, 1)
    }
    assert all(seconds > 0 for seconds in found.scoring.values())
    assert asked.execute(1, lambda _: None, lambda _: None).scoring == found.scoring  # as it took


def test_the_same_benchmark_again_trains_nothing_and_gives_the_same(executed):
    asked, found, _ = executed
    before = {path: path.stat().st_mtime_ns for path in asked.folder.rglob("summary.json")}
    standings = []
    again = asked.execute(1, standings.append, lambda _: None)
    assert again.scores == found.scores
    assert [(one.done, one.total) for one in standings] == [(6, 6)]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_trainings_that_no_shift_needs_are_not_run(tiny):
    asked = Benchmark(tiny, ("local",), chosen_shifts(tiny, "blur"), (0,), None)
    assert [cell.name for cell in asked.cells()] == ["clean.local"]
    asked = Benchmark(tiny, ("local",), chosen_shifts(tiny, "label-noise"), (0,), None)
    assert [cell.name for cell in asked.cells()] == ["clean.local", "label-noise.local"]


def test_a_run_that_fails_is_missing_with_its_reason_and_the_others_are_scored(tmp_path, tiny):
    flags = {**tiny.flags, "rounds": 1, "local_epochs": 1, "likelihood": "gaussian"}
    del flags["calibrate"]
    setting = attrs.evolve(tiny, flags=flags)
    asked = Benchmark(setting, ("local",), chosen_shifts(setting, "blur"), (0,), tmp_path)
    found = asked.execute(1, lambda _: None, lambda _: None)
    assert found.scores == {}
    (one,) = found.missing
    assert one[:3] == ("clean", "local", 0)
    assert "likelihood" in one[3]


def test_foreign_samples_that_are_not_there_are_named_before_anything_runs(tmp_path, tiny):
    setting = attrs.evolve(tiny, foreign={"ood-digits": ("clean", "tiny-imagenet")})
    asked = Benchmark(setting, ("local",), chosen_shifts(setting, ""), (0,), tmp_path / "out")
    with pytest.raises(DataError, match=r"shift ood-digits: .*or leave it out: --shifts"):
        asked.execute(1, lambda _: None, lambda _: None)
    assert not (tmp_path / "out").exists()


def test_all_methods_that_classify_take_part_and_the_others_are_named(tiny):
    chosen, left_out = chosen_methods([], tiny)
    assert {"local", "fedavg", "fedvi"} <= {*chosen}
    assert "glm" not in chosen
    if "centralised" in chosen:
        assert chosen[-1] == "centralised"
    assert all(left_out.values())


def test_training_alone_is_always_among_the_methods(tiny):
    assert chosen_methods(["fedvi", "fedvi"], tiny) == (("fedvi", "local"), {})


def test_an_unknown_method_is_refused_with_the_nearest_name(tiny):
    with pytest.raises(OptionError, match=r"unknown method 'fedavgg' \(did you mean fedavg"):
        chosen_methods(["fedavgg"], tiny)
