"""Everything that the ranks of a running job do together.

`job_options`         options of a job, their defaults and checks
`job`                 join a job; its ranks, their devices, graph and cluster
`job_address`         where the ranks of a job meet
`agreement`           share results; raise the error of one rank on all
`monitoring/`         ranks that die or wait, and steps that take longer than predicted
`ddp_profiling`       profile every class in steps of the job
`data_parallel`       DDP around a planned model, averaged once
`accelerate_state`    what Accelerate was asked for
`plan_cache`          find and read a cached plan
`gradient_weighting`  unequal batches: the gradient of the mean over all samples or tokens
`gradient_codecs`     sums of compressed gradients, with residuals by parameter
`exchange_prices`     seconds and errors of compressed exchanges between the ranks
`shares`              which rank takes which samples of a global batch
`share_sampler`       each rank's share of the batch, for a DataLoader
`divided_optimizer`   an optimizer whose state is divided over the ranks
`length_sampler`      sequences for each rank, by predicted time
"""
