"""Coefficients in the units of the data, against regressions of the untouched columns."""

from __future__ import annotations

import numpy as np
import pytest

import bflcore
from bflcore.errors import OptionError, RunError
from bflcore.experiments.coefficients import INTERCEPT, read_coefficients


def table(seed=0, n=120):
    draw = np.random.default_rng(seed)
    age, ward = draw.normal(60, 12, n), draw.choice(["a", "b", "c"], n)
    score = 5 + 0.3 * age - 4 * (ward == "b") + draw.normal(0, 1, n)
    return {"age": age, "ward": ward, "score": score, "site": draw.integers(0, 3, n)}


def trained(tmp_path, columns, method="fedavg", **flags):
    return bflcore.run(
        method,
        data=columns,
        client="site",
        out=tmp_path / "run",
        test_fraction=0.0,
        **{"model": "linear", "rounds": 1, **flags},
    )


def test_coefficients_are_those_of_the_columns_as_they_are(tmp_path):
    columns = table() | {"site": np.zeros(120, int)}
    sgd = {"lr": 0.03, "batch_size": 1000, "local_epochs": 400}
    run = trained(tmp_path, columns, target="score", options={"inference.optimiser": "sgd"}, **sgd)
    design = [np.ones(120), columns["age"], columns["ward"] == "b", columns["ward"] == "c"]
    expected = np.linalg.lstsq(np.stack(design, 1), columns["score"], rcond=None)[0]
    found = run.coefficients()
    assert [one.feature for one in found] == [INTERCEPT, "age", "ward=b", "ward=c"]
    assert {one.output for one in found} == {"score"}
    np.testing.assert_allclose([one.mean for one in found], expected, rtol=1e-3, atol=1e-3)
    assert all(one.sd is None and one.lower is None for one in found)  # a point estimate


def test_deviations_and_intervals_are_in_the_units_of_the_data(tmp_path):
    columns = table()
    run = trained(tmp_path, columns, "fedvi", target="score", options={"inference.lr": 1e-12})
    narrow, wide = run.coefficients(0.5), run.coefficients(0.95)
    age, unit = wide[1], columns["score"].std() / columns["age"].std()
    assert age.sd == pytest.approx(0.0486 * unit, rel=1e-3)  # the initial standard deviation
    assert age.upper - age.mean == pytest.approx(1.959964 * age.sd, rel=1e-6)
    assert narrow[1].upper - narrow[1].mean == pytest.approx(0.674490 * age.sd, rel=1e-6)
    # The intercept is at age 0, 60 years from any sample: its uncertainty includes the slope's.
    away = columns["age"].mean() * age.sd
    own = 0.0486 * columns["score"].std()
    assert wide[0].sd == pytest.approx(np.hypot(own, away), rel=1e-3)


def test_two_classes_of_softmax_have_coefficients_each(tmp_path):
    columns = table()
    columns["score"] = np.where(columns["score"] > 22, "high", "low")
    found = trained(tmp_path, columns, target="score").coefficients()
    assert [one.output for one in found] == ["high"] * 4 + ["low"] * 4
    assert all(one.ratio is None for one in found)


def test_other_models_have_none(tmp_path):
    run = trained(tmp_path, table(), target="score", model="mlp")
    with pytest.raises(RunError, match="train one with --model linear"):
        run.coefficients()


@pytest.mark.parametrize("level", [0.0, 1.0, float("nan")])
def test_a_level_that_is_not_a_share_is_refused(tmp_path, level):
    with pytest.raises(OptionError, match="--level"):
        read_coefficients(tmp_path, level)
