"""Handovers as engines have them: other work in both processes, and a pause before the last chunk.

On each side a scheduler thread looks every 0.2 ms what has changed, while another thread holds the interpreter as an
engine would. Requests go one at a time, with their last chunk some time after the grant, and then 16 at once, to see
what the calls cost the scheduler. The same is done with bare NIXL, which its scheduler thread polls with naps of 50 us,
and with SGLang's own sender and receiver, in the environment that `make test-sglang` makes:

    .cache/sglang/bin/python -m benchmarks embedded --sglang
"""

from benchmarks.embedded.command import add_arguments, prepare

__all__ = ["add_arguments", "prepare"]
