"""What authors of plugins test with."""
