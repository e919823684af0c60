"""Train one model on unequal ranks in every way there is, in turns: the main experiment.

`__main__`         on the ranks of a job as they are, on any number of hosts
`launch`           on two ranks of this machine, one of them emulated: `qsync demo`
`rank`             one rank: profile, plan, train, measure
`ways`             every way to train as a plan
`predicted_steps`  replay's prediction of each way
`timed_steps`      the training steps of one way on one rank, timed
`report`           figures.json, its bars, the table and the files
`clusters`         one comparable line for each pile of cards
`publish`          write the figures into README and docs
"""
