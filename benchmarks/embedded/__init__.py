"""Handovers under engine conditions: other work in both processes, and a pause before the last chunk.

On each side a scheduler thread polls for changes every 0.2 ms, while another thread holds the GIL as an engine would.
Requests go one at a time, with the last chunk some time after the grant, and then 16 at once, to measure what the calls
cost the scheduler. The benchmark does the same with bare NIXL, which its scheduler thread polls with naps of 50 us, and
with SGLang's own sender and receiver, in the environment that `make test-sglang` creates:

    .cache/sglang/bin/python -m benchmarks embedded --sglang
"""

from benchmarks.embedded.command import add_arguments, prepare

__all__ = ["add_arguments", "prepare"]
