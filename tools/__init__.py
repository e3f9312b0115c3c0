"""What the project is worked on with; not part of what is installed."""
