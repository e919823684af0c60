"""A running job that is watched: ranks that die or wait, steps that take longer than predicted.

`liveness`        name a rank that dies, and stop
`pulses`          the last beat of each rank
`positions`       where each rank's loop stands, and whom the others wait for
`step_phases`     the time of each phase of a training step
`loader_batches`  every batch that a DataLoader hands out
`reached_rate`    the samples per second of the first steps
`gradient_hooks`  hooks on a few gradients of every backward
`step_log`        the phases of every step, as JSON lines
`drift_monitor`   a running job against its prediction
`first_steps`     the first real steps correct profiles and plan
"""
