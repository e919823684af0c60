"""Run a model under a plan: the FX pass and the program that executes it.

`planned_forward` a model's forward, replaced so that it runs through its program `program` a model's traced
graphs, rewritten for a plan `choosers` functions from a graph to the precision of each operator `wrapping`
the arguments of `wrap`, remembered for copies of the model `saved_models` qsync's data in files of a wrapped
model `sharded_blocks` parts of a plan for blocks that FSDP2 shards `rewriting` the FX pass: one call per node
of the lowered graph `memory_order` where a rewritten graph restores traced strides `node_calls` nodes' calls
besides torch: casts, kernels, reports `operator_timing` fastest precision of each operator, without a profile
`weight_cache` cast weights once per optimizer step on CPUs `activation_recomputation` recompute modules'
forward in backward `model_coverage` `qsync.coverage`, of a wrapped model `coverage` share of a model in the
requested precision, with reasons for the rest
"""
