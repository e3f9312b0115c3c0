"""A plan that misses its budget is made again, once, with what the first steps have shown.

What no graph shows: what else lies on the device, how many calls of compiled graphs wait for their backward at a time,
and by how much a predicted peak is wrong. ``device_steps.py`` counts and marks while steps run, ``decision.py`` decides
from that, as plain data, and ``replanner.py`` has Dynamo compile the frame again; the compile that follows finds the
``correction.py`` under what its graph computes, and plans with it.
"""
