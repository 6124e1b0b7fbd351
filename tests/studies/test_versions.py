"""Versions that differ between runs are named."""

from bflcore.studies.versions import differing

ONE = {
    "python": "3.12.1",
    "platform": "Linux-6.1",
    "torch": "2.8",
    "distributions": {"bflcore": "0.1", "bfl-best": "0.1"},
}


def test_what_differs_is_named_with_its_values():
    assert differing([]) == differing([ONE]) == differing([ONE, dict(ONE)]) == ""
    other = ONE | {"platform": "Linux-6.2", "torch": "2.9", "distributions": {"bflcore": "0.2"}}
    assert differing([ONE, other]) == (
        "The runs were made with different versions (torch: 2.8, 2.9; bflcore: 0.1, 0.2; "
        "bfl-best: 0.1, absent): differences may be due to these."
    )


def test_the_platform_is_named_only_if_nothing_else_differs():
    assert "(platform: Linux-6.1, Linux-6.2)" in differing([ONE, ONE | {"platform": "Linux-6.2"}])
