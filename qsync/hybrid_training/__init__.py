"""`qsync.hybrid`: unequal ranks train one model, each under its part of a plan.

`hybrid_job`      `hybrid`: join, check, plan, wrap, watch
`job_plan`        the plan of a job: given, cached, or made from profiles
`saved_plan`      choose, judge and save a plan with its basis; its report
`planned_rank`    run one rank's part: wrap the model, weigh its gradients, watch its steps
`shared_batches`  the batches that are profiled, and the shares that a sampler hands out
`framework_ddp`   the DDP that a framework puts around a planned model
"""
