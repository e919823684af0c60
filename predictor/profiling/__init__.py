"""Profiling: the time of every operator, cast, link and loader on this device.

`profiler`           time whole steps at every precision, round after round
`runner`             the model as it is run for a profile, and checks of its loss
`mixed_assignments`  the assignments that a round times
`node_timer`         time every node inside a running step
`step_statistics`    costs, noise and error from the times of all steps
`machine_drift`      estimate how slow the machine was at each moment
`clocks`             wall time, time of an emulated device, CUDA events, launches of kernels
`launches`           what launching kernels takes of the host's time
`loader_wait`        time the wait for the next batch
`leg_benchmark`      measure messages within and between hosts, in each direction
`link_benchmark`     measure the all-reduce between ranks and what it takes from compute
"""
