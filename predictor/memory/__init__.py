"""Memory: when every tensor of a step lives, and the peak.

`peak`             the peak of a step, by part; updated when one operator changes
`vectorized_peak`  the same peak of a whole lowered graph, by lookups
`lifetimes`        from when to when each tensor of a step lives
`layout`           shapes, storages and their readers, which follow from the graph alone
`saved_tensors`    the tensors that each kind of operator saves for backward
`expanded_operands`  the operands that torch.matmul expands
`workspaces/`      the memory that kernels need while they run
`recomputation`    lifetimes where blocks run forward again in backward
`spans`            the record of one tensor's life
`cuda_allocator`   the rounding of torch's caching allocator on GPUs

`memory_error.json` holds the measured errors of the model, from qsync.experiments.memory.memory_error.
"""
