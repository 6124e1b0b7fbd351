"""Federated ADMM from Bayesian duality, a plugin of bflcore."""
