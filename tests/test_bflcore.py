"""The package itself: what an import imports, and names that need an extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bflcore


def test_importing_bflcore_does_not_import_scikit_learn():
    program = "import sys, bflcore; print('sklearn' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert found.stdout.split() == [b"False", b"False"]


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "bflcore.api.estimators", raising=False)
    monkeypatch.delattr(bflcore.api, "estimators", raising=False)
    with pytest.raises(ImportError, match=r"scikit-learn 1.6.*pip install 'bflcore\[sklearn\]'"):
        _ = bflcore.BayesianFederatedClassifier
    with pytest.raises(AttributeError, match="has no attribute 'Absent'"):
        _ = bflcore.Absent


def test_the_estimators_are_listed_beside_the_names_that_need_no_extra():
    assert {"BayesianFederatedClassifier", "Run"} <= set(dir(bflcore))
    assert "BayesianFederatedClassifier" not in bflcore.__all__  # import * needs no extra
    assert bflcore.BayesianFederatedRegressor.__name__ == "BayesianFederatedRegressor"
