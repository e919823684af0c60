"""Plant faults in a real job of two ranks, and check qsync's diagnoses and false alarms.

`job`       the trained job, and the parts that a fault may change
`faults`    the faults, and their expected diagnoses
`training`  one rank of the job
`runs`      start the ranks under torchrun, and read qsync's output
"""
