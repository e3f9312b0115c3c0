"""Logits that are not made until somebody reads them."""
