"""Does a rewritten graph compute what its graph from before did? Inputs, comparison, and the check of each call."""
