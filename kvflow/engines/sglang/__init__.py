"""kvflow as a transfer backend of SGLang 0.5.23: `--disaggregation-transfer-backend kvflow`.

- `plugin`: makes SGLang know it, through its entry point for plugins.
- `manager`: one for each scheduler, with the rank of kvflow that all its requests share.
- `ends`: sender and receiver of one request, as SGLang's queues drive them.
- `memory`: SGLang's pointer lists as a layout, and its index lists as page tables. Pure; `states` is its part for what
  is not K and V.
- `metadata`: the first token and what belongs to it, as bytes.
- `quarantine`: what an operator sees of pages without a proof, and how they are released by hand.
- `settings`: what SGLang's command line has no words for.
"""
