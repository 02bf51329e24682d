"""kvflow between two `ContinuousBatchingManager`s of transformers 5.23 and 5.24.

- `prefill`, `decode`: the two ends, each on the manager of its process.
- `engine`: hooks them into a manager's generation loop, and holds its blocks.
- `memory`: its cache as a layout, and its block tables as page tables. Pure.
- `metadata`: the first token, as bytes.
"""
