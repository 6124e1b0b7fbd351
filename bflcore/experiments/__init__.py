"""Experiments: resolved from settings, run round by round, kept in a directory."""
