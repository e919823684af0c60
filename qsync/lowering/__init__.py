"""Lowering: decide where casts go for an assignment of precisions. Pure; no torch.

`lowered_graph`  hold operators and casts in execution order
`cast_rules`     decide about one operator from its neighbours
`wiring`         read off a graph which operator reads which value
`incremental`    lower a graph, change one operator at a time, undo exactly
`vectorized`     lower a whole assignment by tables, for searches
`numbering`      number distinct keys in arrays
"""
