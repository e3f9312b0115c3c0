"""Figures: each module prints a table of what it measured, with ratios against eager and plain Inductor in one run."""
