"""Every use of torch's private parts, and every difference between torch 2.11 and 2.15. Nothing else.

Other modules call these functions instead of importing ``torch._dynamo``, ``torch._inductor`` and the like, so that a
new torch release is met in this folder alone: one file for each part of torch.
"""
