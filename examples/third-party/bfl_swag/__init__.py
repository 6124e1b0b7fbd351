"""Federated SWAG, a plugin of bflcore."""
