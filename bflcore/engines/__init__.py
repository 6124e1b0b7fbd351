"""Engines: where clients run."""
