"""FedAvg's client as a user of Flower would write it, for `flower_round.py`.

A module of its own: Ray's processes import it.
"""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from problems import BATCH, EPOCHS, network, problem

from bflcore import Problem

__all__ = ["client_app"]


def client_app() -> ClientApp:
    """Return the client that a user of Flower would write for this job."""
    app = ClientApp()
    app.train()(train)
    return app


def train(message: Message, context: Context) -> Message:
    """Train one client from the arrays that came, and send its own back."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data().train.of(int(context.node_config["partition-id"]))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict())}
    content["metrics"] = MetricRecord({"num-examples": len(x)})
    return Message(RecordDict(content), reply_to=message)


@cache
def data() -> Problem:
    """Return the data, once a process."""
    torch.set_num_threads(1)
    return problem()
