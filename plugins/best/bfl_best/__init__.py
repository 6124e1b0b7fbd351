"""bfl-best: the best method that the parts of bflcore make."""
