"""BFL-Shift: a benchmark of uncertainty under federated shift."""
