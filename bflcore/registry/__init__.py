"""Plugins: kinds of component, hooks, and what is installed."""
