"""Flower as an engine: rounds of bflcore in Flower's simulation, or on its servers and nodes."""
