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

from glue_compiler.graph_file import load, save
from glue_compiler.testing.assertions import (
    GraphAssertionError,
    assert_equivalent,
    assert_rewritten,
    assert_untouched,
    count_ops,
    find,
)
from glue_compiler.testing.captures import Capture, capture, compile_and_keep
from glue_compiler.testing.pass_runs import PassRun, run_pass

__all__ = [
    "Capture",
    "GraphAssertionError",
    "PassRun",
    "assert_equivalent",
    "assert_rewritten",
    "assert_untouched",
    "capture",
    "compile_and_keep",
    "count_ops",
    "find",
    "load",
    "run_pass",
    "save",
]
