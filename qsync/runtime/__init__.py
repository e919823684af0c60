"""Running a model under a plan: the FX pass and the program that executes it.

`planned_forward`           a model's forward, replaced so that it runs through its program
`program`                   what runs in a model's place: its traced graphs, rewritten as a plan says
`choosers`                  functions from a graph to the precision of each operator
`wrapping`                  what `wrap` was asked for, remembered for copies of the model
`saved_models`              what files of a wrapped model hold of qsync
`sharded_blocks`            the part of a plan that a block runs which FSDP2 shards
`rewriting`                 the FX pass: one call per node of the lowered graph
`memory_order`              where a rewritten graph lays elements out as they were traced
`node_calls`                what its nodes call besides torch: casts, kernels, reports
`operator_timing`           which precision is fastest for each operator, where no profile says so
`weight_cache`              weights are cast once per optimizer step on CPUs
`activation_recomputation`  modules compute forward again in backward
`model_coverage`            `qsync.coverage`, of a wrapped model
`coverage`                  how much of a model runs as asked, and why the rest does not
"""
