"""Ten common training scripts, and the few lines that convert each to qsync.

Each script is a complete program for torchrun. It prints its loss at every step and saves a checkpoint.

`conversions`    the changed lines of each client
`start`          a client on two ranks, plain or converted
`observed_rank`  one rank of a client, observed from outside
"""
