"""Forms of one computation that mean the same: tests go through all of them."""
