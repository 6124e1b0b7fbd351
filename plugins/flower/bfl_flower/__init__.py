"""Flower as an engine: bflcore's rounds in Flower's simulation, or on its servers and nodes."""
