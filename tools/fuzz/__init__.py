"""Random programs of the kinds that the passes look for, compiled with glue and compared with eager.

``python -m tools.fuzz --seconds 300``; docs/fuzzing.md says what is drawn, and how to read a failure.

- ``kinds`` draws a program (``attention``, ``experts``, ``metadata``), as ``programs`` has it: plain data, printed as a
  Python module. ``twists`` are statements that may stand anywhere in it, ``callers`` say what is done with what it
  returns, and ``settings`` under which of torch's settings it runs.
- ``harness`` runs a program and compares; ``check`` compiles it, where ``small_steps`` count. ``campaign`` is the loop.
- ``graphs`` captures a program's graph, ``mutations`` change it, and ``graph_campaign`` runs one pass on it.
- ``failures`` finds out whose fault a failure is, ``shrink`` makes it smaller, ``script`` prints it.
"""
