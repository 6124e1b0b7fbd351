"""The trust region is for liars: no honest client of any method is refused."""

from __future__ import annotations

import pytest

from bflcore.experiments.directory import RunDirectory
from bflcore.experiments.prepare import prepare
from bflcore.experiments.resolve import resolve
from bflcore.experiments.run import execute
from bflcore.registry.loading import load_registry

METHODS = load_registry().methods
# One for each way to infer; `make test-thorough` runs all.
ALWAYS = {"fedavg", "fedvi", "bpfed", "fedsi-fac", "superfed-mm", "em-tdamp", "pvi", "fedivon"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # caveats of small runs
@pytest.mark.parametrize("partition", ["labels:5", "quantity:0.3", "dirichlet:0.3"])
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in METHODS],
)
def test_no_honest_client_is_refused(tmp_path, method, partition):
    settings = {
        "rounds": 6,
        "eval_every": 100,
        "data": {"data": "digits", "clients": 10, "partition": partition},
        "engine": {"workers": 1},
    }
    prepared = prepare(resolve(load_registry(), method, {}, settings))
    summary = execute(prepared, RunDirectory.create(tmp_path / "run", prepared, load_registry()))
    assert summary["dropped"] == []
