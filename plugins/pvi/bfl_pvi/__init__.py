"""Partitioned variational inference, a plugin of bflcore."""
