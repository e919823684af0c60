"""Experiments: one script per table or figure, the workloads, and the demo.

`harness`      the run loop, ranks, paired timing, peers, tables and pictures
`workloads`    models and data
`demo`         two unequal ranks train, against every alternative
`kernels`      kernels and whole steps against their bars and peers
`sensitivity`  indicators against measured gradient errors
`prediction`   replay against real steps, learned costs, the promised limits
`memory`       predicted bytes against measured ones
`allocation`   plans against those of other methods
`levers`       levers, predicted and measured
`unseen`       a suite of unseen models: speed beside peers, predictions
`takeover`     what users do to a wrapped model
`expansion`    what growing a model saves
"""
