"""What the suite does on each torch and transformers: a plugin of pytest writes it, a command makes a table."""
