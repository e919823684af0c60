"""Experiments: one script per table or figure, the workloads, and the demo.

`harness`      the run loop, ranks, paired timing, peers and tables
`workloads`    models and data
`results`      all of the below, run again; what papers promise, beside what is found
`mixed`        the main job: unequal ranks train in every way, in turns (`qsync demo`)
`accuracy`     final accuracy of every way to train on two unequal ranks
`pays`         verdicts from data sheets on common piles of cards
`speedup`      samples per second of every way to use a weak card
`kernels`      kernels against their bars and peers
`sensitivity`  indicators against measured gradient errors
`prediction`   random plans on real ranks, the promised limits
`memory`       predicted bytes against measured ones
`allocation`   plans against those of other methods
`small_memory`  plans for a weak rank of little memory, in every way, replayed and measured
`unseen`       a suite of unseen models: speed beside peers, predictions
`takeover`     what users do to a wrapped model
`integrations`  training loops of other libraries around planned models
`elastic`      cards that come and go
`links`        step time against the bandwidth between two hosts
`clients`      ten training scripts as people write them
`diagnosis`    faults planted in real jobs, and what qsync names
`gpu`          every claim about GPUs, measured on one
`expansion`    what growing a model saves
"""
