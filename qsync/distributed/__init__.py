"""Everything that the ranks of a running job do together.

`job`                 join a job; its ranks, their devices, graph and cluster
`job_address`         where the ranks of a job meet
`agreement`           share results; raise the error of one rank on all
`monitoring/`         ranks that die or wait, and steps that take longer than predicted
`ddp_profiling`       profile every class in steps of the job
`data_parallel`       DDP around a planned model, averaged once
`framework_ddp`       the DDP that a framework puts around a planned model
`accelerate_state`    what Accelerate was asked for
`plan_cache`          find and read a cached plan
`gradient_weighting`  unequal batches: the gradient of the mean over all samples or tokens
`gradient_codecs`     sums of compressed gradients, with residuals by parameter
`exchange_prices`     seconds and errors of compressed exchanges between the ranks
`shares`              which rank takes which samples of a global batch
`share_sampler`       each rank's share of the batch, for a DataLoader
`shared_batches`      the batches that `hybrid` profiles, and the shares that it hands out
`divided_optimizer`   an optimizer whose state is divided over the ranks
`length_sampler`      sequences for each rank, by predicted time
"""
