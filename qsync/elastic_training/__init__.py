"""Elastic training: cards join and leave a running job, and every step trains one global batch.

`start_job` `elastic`: join a job `elastic_job` the job as a training loop sees it: steps, shares, leaving,
healing `rendezvous` the cards of a step, from torchft's lighthouse `elastic_ddp` DDP over a process group
that changes `share_loader` the samples of this card's share, loaded `plan_book` profiles by class and plans
by membership, made ahead `planning_process` planning in a separate process `card_plan` the plan that this
card runs `training_state` weights, optimizer, other states and random numbers `healing` the training state,
sent to a card that is behind `job_token` proofs that a card belongs to the job `waiting` periodic log lines
about waiting `pace` whether this card is slower than planned
"""
