"""The baselines of the five papers, as combinations of sharing, schedule and penalty."""
