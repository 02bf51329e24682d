"""kvflow as a transfer backend of SGLang 0.5.23: `--disaggregation-transfer-backend kvflow`.

- `plugin`: registers it with SGLang, through the entry point for plugins.
- `manager`: one for each scheduler, with the rank that all of its requests share.
- `ends`: sender and receiver of one request, driven by SGLang's queues.
- `memory`: SGLang's pointer lists as a layout, and its index lists as page tables. Pure; `states` handles whatever is
  not K and V.
- `metadata`: the first token and its details, as bytes.
- `quarantine`: shows pages in quarantine to an operator, who can release them.
- `settings`: settings that SGLang's command line lacks; `options`: what becomes of those that it has.
"""
