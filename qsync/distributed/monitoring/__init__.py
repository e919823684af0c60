"""Monitor a running job: dead and stuck ranks, and steps slower than predicted.

`liveness` name a rank that dies, and stop `pulses` the last beat of each rank `positions` each rank's
position in its loop, and the rank that others wait for `step_phases` the time of each phase of a training
step `loader_batches` every batch that a DataLoader hands out `reached_rate` the samples per second of the
first steps `gradient_hooks` hooks on a few gradients of every backward `step_log` the phases of every step,
as JSON lines `drift_monitor` compares a running job with its prediction `first_steps` the first real steps
correct profiles and plan
"""
