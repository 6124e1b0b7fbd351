"""What a hook yields must be complete: the listings, refusals and the matrix rely on it."""

import textwrap

import pytest

import bflcore
from bflcore import PluginError
from bflcore.options.kinds import KINDS, kind_called
from bflcore.registry.loading import load_registry
from bflcore.registry.validation import check_component

RULE = """
    @component
    class Rule(Aggregator):
        name = "rule"
        {}
        def fuse(self, posteriors, weights, prior): ...
"""
INFERENCE = """
    @component
    class Rule(LocalInference):
        name = "rule"
        {}
        def initial(self, problem): ...
        def fit(self, problem, broadcast, cohort): ...
        def predict(self, problem, broadcast, cohort, x): ...
"""
UPDATE = """
    @component
    class Rule(HyperUpdate):
        name = "rule"
        {}
        def update(self, broadcast, fused, total): ...
"""
LIKELIHOOD = """
    @component
    class Rule(Likelihood):
        name = "rule"
        {}
        def nll(self, outputs, targets): ...
        def predictive(self, outputs): ...
"""
INHERITING = """
    @component
    class Rule(Map):
        name = "rule"
        {}
"""


def declared(source, line):
    scope = dict(vars(bflcore))
    exec(textwrap.dedent(source).format(line), {"__name__": __name__, **scope}, scope)
    return scope["Rule"]


FAULTS = [
    (INFERENCE, "", "Rule, which has no family; write family = ... in the class"),
    (LIKELIHOOD, "", "Rule, which has no task; write task = ... in the class"),
    (RULE.replace("def fuse", "def fuze"), "", "Rule, which does not define fuse"),
    (INFERENCE, 'family, needs = "gaussian", "sites"', "its needs must be a mapping of kinds to"),
    (RULE, 'families = "gaussian"', "its families must be a tuple of names, as in families = "),
    (RULE, 'tags = "pools"', "its tags must be a set of names, as in tags = "),
    (
        RULE,
        'tags = frozenset({"pools", "additve"})',
        "unknown tag 'additve' (did you mean additive?); allowed: pools, adds-evidence, ",
    ),
    (INHERITING, 'tags = frozenset({"pools"})', "unknown tag 'pools'"),
    (UPDATE, 'tags = frozenset({"monoton"})', "'monoton' (did you mean monotone?)"),
    (RULE, "reference = None", "its reference must be text"),
    (RULE, 'expected_failures = "none"', "its expected_failures must be a mapping"),
    (RULE, "x: int = attrs.field()", "Rule, whose option x has no default; write option(default"),
    (
        INHERITING,
        'x: "Nothing" = option(1, "help")',
        "Rule, whose options have types that cannot be read (NameError",
    ),
    (INHERITING, 'hides = "lr"', "its hidden options must be a tuple of names"),
    (
        INHERITING,
        'hides = ("momentun",)',
        "unknown hidden option 'momentun' (did you mean momentum?)",
    ),
]


@pytest.mark.parametrize(("source", "line", "said"), FAULTS, ids=[said for *_, said in FAULTS])
def test_an_incomplete_component_is_refused_in_one_line(source, line, said, monkeypatch):
    monkeypatch.setattr(bflcore, "attrs", __import__("attrs"), raising=False)
    part = declared(source, line)
    with pytest.raises(PluginError) as caught:
        check_component(part, kind_called(part.kind))
    assert str(caught.value).startswith(f"{kind_called(part.kind).hook} yielded Rule")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [RULE, UPDATE])
def test_what_a_base_has_a_default_for_may_be_left_out(source):
    part = declared(source, "")
    check_component(part, kind_called(part.kind))
    assert part.families == ()


def test_every_component_that_is_installed_is_complete():
    for kind in KINDS:
        for part in load_registry().of(kind.name).values():
            check_component(part, kind)
