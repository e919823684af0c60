"""Running a model under a plan: the FX pass and the program that executes it.

`planned_forward`           a model's forward, replaced so that it runs through its program
`program`                   a model's traced graphs, rewritten by a plan, run in its place
`choosers`                  functions from a graph to the precision of each operator
`wrapping`                  the arguments of `wrap`, kept for copies of the model
`saved_models`              reading and writing files of a whole wrapped model
`sharded_blocks`            the parts of a plan that blocks sharded by FSDP2 run
`rewriting`                 the FX pass: one call per node of the lowered graph
`memory_order`              keeping traced memory orders in a rewritten graph
`node_calls`                functions that nodes call besides torch's: casts, kernels, reports
`operator_timing`           which precision is fastest for each operator, where no profile says so
`weight_cache`              weights are cast once per optimizer step on CPUs
`activation_recomputation`  modules compute forward again in backward
`model_coverage`            `qsync.coverage`, of a wrapped model
`coverage`                  how much of a model runs as asked, and why the rest does not
"""
