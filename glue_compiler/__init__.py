"""glue: a ``torch.compile`` backend that removes the work between the fast kernels.

``torch.compile(model, backend="glue")`` needs no import of this package.
"""

__version__ = "0.1.0"
