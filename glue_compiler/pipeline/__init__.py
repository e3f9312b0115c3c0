"""Which passes run, in what order, and what is seen, undone and recorded of them."""
