"""Running a model under a plan: the FX pass and the program that executes it.

`program`                   what runs in a model's place: PlannedForward, and the program behind it
`wrapping`                  what `wrap` was asked for, remembered for copies of the model
`sharded_blocks`            the part of a plan that a block runs which FSDP2 shards
`rewriting`                 the FX pass: one call per node of the lowered graph
`islands`                   what stands between products, compiled where that is faster
`operator_timing`           which precision is fastest for each operator, where no profile says so
`weight_cache`              weights are cast once per optimizer step
`activation_recomputation`  modules compute forward again in backward
`coverage`                  how much of a model runs as asked, and why the rest does not
"""
