"""``glue replay FILE``."""

from __future__ import annotations

from pathlib import Path

from glue_compiler.verify import replay as replays


def replay(file: Path) -> int:
    """Run one dumped graph alone, time it, and check it against the graph before.

    Args:
        file: a dumped graph, a replay file, or the folder of a failed verification.

    Returns:
        The exit code: 1 if results differ.
    """
    found = replays.replay(file)
    for each in found:
        print(each.file)
        times = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in each.milliseconds.items())
        if times:
            print(f"  one run in eager operators: {times}")
        for name, how in each.differences.items():
            print(f"  {name}: {how}")
        if each.differences or "before" in each.milliseconds:
            print(f"  before and after {'differ' if each.differences else 'agree'}")
    if file.is_dir() and not any(each.differences for each in found):
        print("Alone they agree: what differed comes from compiling them, or from a state that no graph shows.")
    return int(any(each.differences for each in found))
