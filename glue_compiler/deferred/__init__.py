"""Logits that are not made until somebody reads them.

``outputs.py`` puts them in place of a graph's outputs, ``tensor.py`` is what the caller gets, ``rules.py`` says which
operators need no values, ``values.py`` computes them, ``head.py`` says how, and ``operands.py`` from what.
"""
