"""A rehearsal before a run writes anything: does the user's own network train and predict?

Errors that show only under `torch.func`, in a backward pass or in an estimator would otherwise end
the run in its first round, with a run directory that can never be resumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from bflcore.errors import BflError, OptionError, described
from bflcore.inference.base import answers
from bflcore.lazy import lazy
from bflcore.options import options_of
from bflcore.rounds import Recipe, begin

if TYPE_CHECKING:
    import torch

    from bflcore.experiments.resolve import Experiment
    from bflcore.inference.base import LocalInference
    from bflcore.problem import Problem
else:
    torch = lazy("torch")

__all__ = ["rehearse"]

SAMPLES = 4  # of one client
SHORT = {"local_epochs": 1, "head_epochs": 1, "fine_tune_epochs": 1, "predict_draws": 1}


def rehearse(experiment: Experiment, problem: Problem) -> None:
    """Fit and predict a few samples of the first client.

    Raises `OptionError` if the inference cannot train the network. What it refuses itself is left
    to the run: it may need more samples.
    """
    inference = _short(experiment.inference)
    train = problem.train
    ends = tuple(
        min(end, start + SAMPLES) for start, end in zip(train.start, train.end, strict=True)
    )
    few = attrs.evolve(problem, train=attrs.evolve(train, end=ends), survey={})
    client = next((one for one in problem.clients if few.train.size(one)), None)
    if client is None:
        return
    try:
        _work(experiment, inference, few, client)
    except BflError:
        return
    except Exception as error:
        raise OptionError(
            f"--model: inference {inference.name} cannot train {experiment.model.name}: "
            f"{described(error, type(experiment.model))}; change the network, or choose another "
            "inference (bfl list inference)"
        ) from error


def _work(experiment: Experiment, inference: LocalInference, problem: Problem, client: int) -> None:
    if problem.standardise:
        problem = problem.surveyed(problem.moments(client))
    known = answers(inference, problem, problem.cohort([client], {}, 0))
    problem = problem.surveyed({**problem.survey, **known})
    broadcast = begin(
        Recipe(inference, experiment.aggregator, experiment.weighting, experiment.hyper), problem
    )
    memory = {name: t[None] for name, t in inference.initial_memory(problem).items()}
    cohort = problem.cohort([client], memory, 0)
    problem = problem.for_client(cohort)
    result = inference.fit(problem, broadcast, cohort)
    own = inference.personalise(problem, broadcast, attrs.evolve(cohort, memory=result.memory))
    with torch.no_grad():
        inference.predict(problem, broadcast, attrs.evolve(cohort, memory=own), cohort.x)


def _short(inference: LocalInference) -> LocalInference:
    known = {option.name for option in options_of(type(inference))}
    return inference.replace(**{name: value for name, value in SHORT.items() if name in known})
