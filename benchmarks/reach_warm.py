"""Compiles something when it is imported, so that processes forked after that have what torch imports then."""

import torch
import transformers  # noqa: F401

import benchmarks.reach_case  # noqa: F401

torch.set_num_threads(1)
torch.compile(torch.nn.Linear(2, 2), backend="glue", options={"compiler": "aot_eager"})(
    torch.ones(1, 2)
).sum().backward()
torch._dynamo.reset()
