"""Elastic training: cards join and leave a running job, and every step stays one global batch.

`elastic_job`   what a training loop holds: steps, shares, leaving, healing
`rendezvous`    the cards of a step, from torchft's lighthouse
`elastic_ddp`   DDP over a process group that changes
`shares`        which card takes which samples
`plan_book`     profiles by class and plans by membership, made ahead
`healing`       the training state, sent to a card that is behind
`pace`          whether this card is slower than planned
"""
