"""CUDA devices that are faked on the host, below torch and Triton: see sitecustomize.py, which installs them.

As on a device: tensors say where they are, mixed devices are refused, the host cannot read a device's memory, memory
is counted and can be exhausted, a captured graph holds the launches and addresses of its capture and nothing of it runs
before a replay, waits of the host are errors in a capture and if `set_sync_debug_mode` says so, and the first launch of
a kernel's signature compiles it.

Not as on a device: everything runs when it is launched, in the launching thread; NCCL is gloo; matrix products have
more than a device's precision; no time means anything.
"""
