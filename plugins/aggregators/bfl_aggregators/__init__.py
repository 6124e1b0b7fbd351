"""Fusion rules and weightings for Gaussian posteriors, a plugin of bflcore."""
