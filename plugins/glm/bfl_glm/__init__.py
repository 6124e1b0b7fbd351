"""Generalised linear models: coefficients with credible intervals, as from the pooled table."""
