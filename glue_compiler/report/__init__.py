"""What people see of a compile: dumps, summaries, explain. Reads results, never changes a graph."""
