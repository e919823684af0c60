"""Elastic training: cards join and leave a running job, and every step stays one global batch.

`start_job`         `elastic`: join a job
`options`           its options, and their checks
`elastic_job`       what a training loop holds: steps, shares, leaving, healing
`elastic_step`      one step, and whether a loop uses it whole
`rendezvous`        the records of all cards, from torchft's lighthouse
`meeting`           who is in a step, and who heals from whom
`elastic_ddp`       DDP over a process group that changes
`share_loader`      the samples of this card's share, loaded
`plan_book`         profiles by class and plans by membership, made ahead
`planning_process`  a plan, made in a process of its own
`card_plan`         the plan that this card runs
`training_state`    weights, optimizer, other states and random numbers
`healing`           the training state, sent to a card that is behind
`job_token`         proofs that a card belongs to the job
`waiting`           what a card waits for, said now and then
`pace`              whether this card is slower than planned
"""
