import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bflcore import DataError
from bflcore.data import Dataset, Partition, divide
from bflcore.data.partition import (
    IID,
    Dirichlet,
    Labels,
    Natural,
    Quantity,
    Shards,
    hold_back,
)


def dataset(samples=200, classes=10, **more):
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(samples) % classes)
    return Dataset("toy", "classification", rng.normal(size=(samples, 3)), y, classes, **more)


def regression(samples=40):
    x = np.zeros((samples, 2), np.float32)
    return Dataset("line", "regression", x, np.ones((samples, 1), np.float32))


def rng(seed=0):
    return np.random.default_rng(seed)


ANY = st.sampled_from(
    [IID(), Labels(k=5), Labels(k=10, random=True), Shards(k=2), Dirichlet(a=0.1), Quantity(a=0.3)]
)


@given(ANY, st.integers(2, 12), st.integers(0, 50))
def test_every_sample_goes_to_exactly_one_client(rule, clients, seed):
    shares = rule.assign(dataset(), clients, rng(seed))
    assert len(shares) == clients
    together = np.sort(np.concatenate(shares))
    assert np.array_equal(together, np.arange(200))


@given(ANY, st.integers(0, 20))
def test_a_partition_is_a_function_of_its_seed(rule, seed):
    first, again = (rule.assign(dataset(), 5, rng(seed)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_labels_gives_client_i_the_classes_from_i_times_k():
    data = dataset()
    for i, share in enumerate(Labels(k=3).assign(data, 10, rng())):
        assert set(data.y[share]) == {(i * 3 + j) % 10 for j in range(3)}


def test_labels_refuses_more_classes_than_there_are():
    with pytest.raises(DataError, match="at most 10"):
        Labels(k=11).assign(dataset(), 3, rng())


def test_shards_hold_few_classes():
    data = dataset(1000)
    assert max(len(set(data.y[s])) for s in Shards(k=2).assign(data, 50, rng())) <= 4


@pytest.mark.parametrize("rule", [Dirichlet(a=0.01), Quantity(a=0.01)])
def test_uneven_divisions_end_with_many_clients_and_keep_the_minimum(rule):
    shares = rule.assign(dataset(20_000), 500, rng())
    assert min(map(len, shares)) >= 10
    assert sum(map(len, shares)) == 20_000


def test_scarce_data_lowers_the_minimum_instead_of_failing():
    assert min(map(len, Dirichlet(a=0.01).assign(dataset(40), 20, rng()))) >= 2


def test_natural_follows_the_owners():
    owner = np.repeat([7, 3, 5], [50, 100, 50])
    shares = Natural().assign(dataset(client=owner), 2, rng())
    assert [set(owner[s]) for s in shares] == [{3}, {5}]
    with pytest.raises(DataError, match="exceeds the 3 owners"):
        Natural().assign(dataset(client=owner), 4, rng())
    with pytest.raises(DataError, match="has none"):
        Natural().assign(dataset(), 2, rng())


@pytest.mark.parametrize("rule", [Labels(), Shards(), Dirichlet()])
def test_regressions_have_no_labels_to_divide_by(rule):
    with pytest.raises(DataError, match="allowed: iid, quantity, natural"):
        rule.assign(regression(), 2, rng())


@given(ANY, st.integers(0, 20), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
def test_training_and_test_samples_are_disjoint_and_within_the_caps(rule, seed, train, test):
    data = dataset()
    part = divide(data, rule, 4, rng(seed), train_per_class=train, test_per_class=test)
    for trains, tests in zip(part.train, part.test, strict=True):
        assert not set(trains) & set(tests)
        assert len(trains) > 0
        for cap, indices in ((train, trains), (test, tests)):
            if cap is not None and len(indices):
                assert np.bincount(data.y[indices]).max() <= cap


def test_the_label_split_of_the_papers():
    data = dataset(14_000)
    part = divide(data, Labels(k=5), 10, rng(), train_per_class=50, test_per_class=950)
    assert [len(t) for t in part.train] == [250] * 10
    assert [len(t) for t in part.test] == [5 * 230] * 10  # 1,400 a class among five clients


@given(st.integers(1, 12), st.integers(0, 20), st.sampled_from([0.1, 0.2, 0.5, 0.8]))
def test_the_test_fraction_is_spread_over_a_clients_classes(clients, seed, fraction):
    data = dataset(300)
    part = divide(data, Dirichlet(a=0.3), clients, rng(seed), test_fraction=fraction)
    for trains, tests in zip(part.train, part.test, strict=True):
        share = np.concatenate([trains, tests])
        assert len(tests) == max(1, round(len(share) * fraction))
        exact = np.bincount(data.y[share], minlength=10) * len(tests) / len(share)
        assert np.abs(np.bincount(data.y[tests], minlength=10) - exact).max() < 1


def test_a_share_of_many_classes_of_one_sample_still_tests_a_fifth():
    data = dataset(100, classes=100)
    part = divide(data, IID(), 2, rng())
    assert [len(tests) for tests in part.test] == [10, 10]
    assert data.y[np.concatenate(part.test)].max() > 50  # not the lowest classes alone


def test_a_cap_on_tests_alone_leaves_half_of_a_class_to_training():
    data = dataset(60)
    part = divide(data, IID(), 1, rng(), test_per_class=5)
    assert np.bincount(data.y[part.test[0]]).tolist() == [3] * 10
    assert np.bincount(data.y[part.train[0]]).tolist() == [3] * 10


def test_a_cap_on_tests_alone_tests_one_sample_even_of_single_samples():
    part = divide(dataset(10), IID(), 1, rng(), test_per_class=5)
    assert (len(part.train[0]), len(part.test[0])) == (9, 1)


def test_a_client_of_two_samples_tests_on_one():
    part = divide(dataset(8), IID(), 4, rng())
    assert [len(t) for t in part.train] == [len(t) for t in part.test] == [1] * 4


def test_a_client_of_one_sample_trains_on_it():
    part = divide(dataset(4), IID(), 4, rng())
    assert [len(t) for t in part.train] == [1] * 4
    assert [len(t) for t in part.test] == [0] * 4


def test_held_out_samples_of_natural_owners_stay_with_them():
    owned = {"client": np.arange(200) % 3, "client_test": np.arange(30) % 3}
    data = dataset(200, x_test=np.zeros((30, 3)), y_test=np.arange(30) % 10, **owned)
    part = divide(data, Natural(), 2, rng())
    assert [tests.tolist() for tests in part.test] == [list(range(k, 30, 3)) for k in range(2)]
    # A share of several owners is tested on its classes, whoever owns them.
    mixed = divide(data, Labels(k=2), 5, rng())
    assert [sorted(set(data.y_test[tests])) for tests in mixed.test] == [
        sorted(set(data.y[trains])) for trains in mixed.train
    ]


def test_a_held_out_split_is_never_trained_on_and_matches_the_clients_classes():
    data = dataset(x_test=np.zeros((30, 3)), y_test=np.arange(30) % 10)
    part = divide(data, Labels(k=2), 5, rng())
    assert part.held_out
    assert sum(map(len, part.train)) == 200
    for client, tests in enumerate(part.test):
        assert set(data.y_test[tests]) == {2 * client, 2 * client + 1}
    assert sum(map(len, part.test)) == 30


def test_a_client_without_samples_is_refused_by_name():
    data = Dataset("odd", "classification", np.zeros((6, 1)), np.array([0] * 5 + [1]), 2)
    with pytest.raises(DataError, match="leaves client 3 without samples"):
        divide(data, Labels(k=1), 6, rng())  # three clients share the one sample of class 1


def test_more_clients_than_samples_are_refused():
    with pytest.raises(DataError, match="--clients: 201 exceeds the 200 samples"):
        divide(dataset(), IID(), 201, rng())


def test_counts_below_one_are_refused():
    with pytest.raises(DataError, match="--clients: 0 is not allowed; allowed: 1 to 200"):
        divide(dataset(), IID(), 0, rng())
    with pytest.raises(DataError, match="--train-per-class: 0 is not allowed"):
        divide(dataset(), IID(), 2, rng(), train_per_class=0)


def test_a_saved_partition_is_read_back(tmp_path):
    part = divide(dataset(), Dirichlet(), 5, rng())
    part.save(tmp_path / "partition.npz")
    back = Partition.load(tmp_path / "partition.npz")
    assert back.held_out is False
    assert back.validation == ()
    assert back.clients == part.clients == 5
    for mine, theirs in zip(part.train + part.test, back.train + back.test, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_saved_validation_split_is_read_back(tmp_path):
    part = Partition((np.array([3, 1]), np.array([2])), (np.array([5]),) * 2, True)
    part = attrs.evolve(part, validation=(np.array([4]), np.array([], np.int64)))
    part.save(tmp_path / "partition.npz")
    back = Partition.load(tmp_path / "partition.npz")
    assert [samples.tolist() for samples in back.validation] == [[4], []]
    assert [samples.tolist() for samples in back.train] == [[3, 1], [2]]
    assert back.held_out is True


def test_calibration_samples_are_cut_off_after_validation_and_come_back_from_a_file(tmp_path):
    data = dataset(400, 4)
    whole = Partition(tuple(np.arange(400).reshape(4, 100)), (np.array([], np.int64),) * 4)
    validated = hold_back(data, whole, 3, validation=0.2)
    both = hold_back(data, whole, 3, validation=0.2, calibration=0.25)
    for client in range(4):
        assert both.validation[client].tolist() == validated.validation[client].tolist()
        assert len(both.calibration[client]) == 20  # of the 80 that are left
        rest = {*both.train[client].tolist(), *both.calibration[client].tolist()}
        assert rest == {*validated.train[client].tolist()}
        assert both.train[client].tolist() == sorted(both.train[client])  # in their order
    both.save(tmp_path / "partition.npz")
    back = Partition.load(tmp_path / "partition.npz")
    assert [s.tolist() for s in back.calibration] == [s.tolist() for s in both.calibration]


def test_calibration_samples_are_drawn_whatever_their_class():
    """A class of 2 in 100 would never be drawn if the classes kept their proportions: 0.2 of 10."""
    data = Dataset("made", "classification", np.zeros((100, 1)), np.repeat([0, 1], [98, 2]), 2)
    whole = Partition((np.arange(100),), (np.array([], np.int64),))
    rare = [
        int((hold_back(data, whole, seed, calibration=0.1).calibration[0] >= 98).sum())
        for seed in range(400)
    ]
    assert abs(np.mean(rare) - 0.2) < 4 * np.std(rare) / 20
    assert {len(hold_back(data, whole, s, calibration=0.1).calibration[0]) for s in (0, 1)} == {10}


def test_a_client_of_one_sample_does_not_calibrate():
    data = dataset(3, 1)
    whole = Partition((np.array([0]), np.array([1, 2])), (np.array([], np.int64),) * 2)
    cut = hold_back(data, whole, 0, calibration=0.9)
    assert [len(samples) for samples in cut.calibration] == [0, 1]
    assert [len(samples) for samples in cut.train] == [1, 1]
