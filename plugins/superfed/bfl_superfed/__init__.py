"""SuPerFed: a federated and a local model, and every model on the segment between them."""
