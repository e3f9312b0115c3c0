"""What other programs find glue by: accelerate and pytest."""
