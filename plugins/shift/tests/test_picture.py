"""The picture of the ranks."""

import math

from bfl_shift.picture import draw, mean_ranks


def test_the_picture_has_every_method_shift_and_rank(table):
    picture = draw(table)
    assert picture.startswith("<svg")
    for name in (*table.methods, *table.shifts):
        assert name in picture
    assert draw(table) == picture  # the same table gives the same file


def test_ranks_are_means_over_seeds_with_the_best_method_first(table):
    methods, found = mean_ranks(table)
    assert found.shape == (2, len(table.shifts))
    assert {*methods} == {"fedvi", "local"}
    assert all(math.isclose(column.sum(), 3) for column in found.T)
    assert found[0, 1:].mean() <= found[1, 1:].mean()
