"""Cards that come and go: an elastic job under random events, and what each event costs.

`card`       the process of one card, which logs every step
`cluster`    a lighthouse and cards as real processes: start, kill, stop, release
`events`     random events from a seed, each once the job has recovered from the last
`verdict`    what the logs must show: digests, samples, batches, and what was lost
`torchrun`   the same job under torchrun: hybrid, or plain with checkpoints
`restarts`   what a killed rank costs there
`steady`     the same job without events, elastic and in hybrid
`drift`      a card that becomes slower and recovers
`churn`      what the simulation says of the same events
`saving`     what checkpoints cost training
"""
