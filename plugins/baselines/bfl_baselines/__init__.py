"""The baselines of the five papers, as choices of sharing, schedule and penalty."""
