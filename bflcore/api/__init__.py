"""The front door: run a method, load what it learnt, predict.

    run = bflcore.run("bpfed", data="digits", rounds=20)      # or bflcore.load("runs/mine")
    prediction = run.client(3).predict(x)
    prediction.labels, prediction.probabilities, prediction.epistemic

A run needs its data while it trains. Afterwards the run directory is complete without them.
"""

from bflcore.api.model import ClientModel, load_model
from bflcore.api.prediction import ClassPrediction, Prediction, TargetPrediction
from bflcore.api.runs import Run, load, resume, run

__all__ = [
    "ClassPrediction",
    "ClientModel",
    "Prediction",
    "Run",
    "TargetPrediction",
    "load",
    "load_model",
    "resume",
    "run",
]
