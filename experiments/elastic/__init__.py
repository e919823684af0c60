"""Run an elastic job under random events, and measure the cost of each event.

`card`       the process of one card, which logs every step
`cluster`    a lighthouse and cards as real processes: start, kill, stop, release
`events`     random events from a seed, each once the job has recovered from the last
`verdict`    checks of the logs: digests, samples, batches, and losses
`torchrun`   the same job under torchrun: hybrid, or plain with checkpoints
`restarts`   cost of a killed rank under torchrun
`steady`     the same job without events, elastic and in hybrid
`drift`      a card that becomes slower and recovers
`churn`      the simulation of the same events
`saving`     cost of checkpoints
"""
