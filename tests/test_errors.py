"""Errors name what is allowed, and survive a process boundary."""

import pickle

import pytest

from bflcore.errors import BflError, ClientError, nearest, unknown


def test_an_unknown_name_is_answered_with_the_nearest_and_all_allowed_ones():
    error = unknown("model", "mpl", ["mlp", "lenet"], "bfl list model")
    assert str(error) == (
        "unknown model 'mpl' (did you mean mlp?); allowed: lenet, mlp; bfl list model"
    )


def test_a_name_like_no_other_gets_no_suggestion():
    assert nearest("xyz", ["mlp", "lenet"]) == ""
    assert "none is installed" in str(unknown("model", "mlp", []))


def test_a_clients_error_arrives_whole_from_another_process():
    error = pickle.loads(pickle.dumps(ClientError(3, "fit", "out of memory", "line 1\nline 2")))
    assert error.trace == "line 1\nline 2"
    assert (error.client, error.stage, error.reason) == (3, "fit", "out of memory")
    assert str(error) == "client 3 failed in fit: out of memory"


def test_one_base_catches_every_error():
    with pytest.raises(BflError):
        raise ClientError(3, "fit", "out of memory")
