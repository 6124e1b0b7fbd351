"""The core's own components."""

import pytest

from bflcore.options.kinds import KINDS
from bflcore.registry import builtin
from bflcore.registry.loading import read_plugins


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.default], ids=lambda k: k.name)
def test_the_default_of_every_kind_is_the_cores_own(kind):
    assert kind.default in read_plugins(builtin).of(kind.name)


def test_every_hook_yields_components_of_its_kind_under_names_of_their_own():
    for kind in KINDS:
        hook = getattr(builtin, kind.hook, None)
        yielded = list(hook()) if hook else []
        assert {part.kind for part in yielded} <= {kind.name}
        assert len({part.name for part in yielded}) == len(yielded)
