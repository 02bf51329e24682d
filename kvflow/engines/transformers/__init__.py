"""kvflow between two `ContinuousBatchingManager`s of transformers 5.23.

- `prefill`, `decode`: the two ends, each on the manager of its process.
- `engine`: where they take part in a manager's generation loop, and how they hold its blocks.
- `memory`: its cache as a layout, and its block tables as page tables. Pure.
- `metadata`: the first token, as bytes.
"""
