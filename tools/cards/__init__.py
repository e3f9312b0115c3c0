"""glue's kernels compiled for cards that are not here: what they take of shared memory and registers."""
