"""From the rewritten graph to a callable: the compiler below, and what wraps its results."""
