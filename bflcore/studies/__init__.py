"""Studies of many runs: cells of settings times seeds, executed side by side and compared."""
