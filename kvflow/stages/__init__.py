"""The five stages of a rank, which carry out the core's effects and report the results to it.

`bootstrap` connects two ranks, `enqueue` accepts chunks from the engine, `planning` turns page tables into descriptors,
`submit` posts them, and `aggregate` handles arrived data. The core makes all decisions.
"""
