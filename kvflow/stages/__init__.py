"""What a rank does, in five stages: each carries effects of the core out, and tells it what came of them.

`bootstrap` connects two ranks, `enqueue` takes what the engine gives, `planning` turns page tables into descriptors,
`submit` posts them, and `aggregate` collects what has arrived. No stage decides anything: the core does.
"""
