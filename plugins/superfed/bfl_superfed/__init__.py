"""SuPerFed: a federated and a local model, and the mixtures of both."""
