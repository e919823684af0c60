"""Lowering: decide where casts go for an assignment of precisions. Pure; no torch.

`lowered_graph`  hold operators and casts in execution order
`cast_rules`     decide about one operator from its neighbours
`wiring`         read off a graph which operator reads which value
`table`          ask the rules once for every distinct neighbourhood of a graph, and keep the rows
`incremental`    pick the rows of an assignment, change one operator at a time, undo exactly
`numbering`      number distinct keys in arrays
"""
