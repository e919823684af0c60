"""Faults planted in a real job of two ranks: does qsync name them, and is it silent over a clean job?

`job`       what is trained, and what a fault may change of it
`faults`    what is planted, and what must be named
`training`  one rank of the job
`runs`      start the ranks under torchrun, and read what qsync said
"""
