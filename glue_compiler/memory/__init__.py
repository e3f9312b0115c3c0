"""How many bytes a step may take, and which checkpoint inputs move to the host."""
