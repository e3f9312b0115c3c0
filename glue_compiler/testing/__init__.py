"""A kit for tests of passes: capture graphs as a backend sees them, run a pass, look at what it did.

```python
from glue_compiler.testing import assert_equivalent, assert_rewritten, capture, run_pass

def test_two_equal_sums_become_one():
    (graph,) = capture(lambda x: x.sum() + x.sum(), torch.arange(4))
    result = run_pass(graph, "hoist_metadata")
    assert_rewritten(result, times=1)
    assert_equivalent(result.before, result.after, [torch.arange(4)])
```

With glue installed, pytest prints the difference of the two graphs when one of these assertions fails.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glue_compiler.testing.assertions import (
        GraphAssertionError,
        assert_equivalent,
        assert_rewritten,
        assert_untouched,
        count_ops,
        find,
        operators_of,
    )
    from glue_compiler.testing.captures import capture
    from glue_compiler.testing.pass_runs import PassRun, run_pass

_NAMES = {
    "assertions": (
        "GraphAssertionError",
        "assert_equivalent",
        "assert_rewritten",
        "assert_untouched",
        "count_ops",
        "find",
        "operators_of",
    ),
    "captures": ("capture",),
    "pass_runs": ("PassRun", "run_pass"),
}
# Imported when asked for: the pytest plugin lies here, and is loaded in runs that never use torch.
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glue_compiler.testing' has no attribute '{name}'")
    return getattr(import_module(f"glue_compiler.testing.{_HOMES[name]}"), name)


__all__ = [
    "GraphAssertionError",
    "PassRun",
    "assert_equivalent",
    "assert_rewritten",
    "assert_untouched",
    "capture",
    "count_ops",
    "find",
    "operators_of",
    "run_pass",
]
