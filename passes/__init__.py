"""The rewrites. Each is an analysis, which reads a graph and returns a plan, and a small rewrite that applies it."""
