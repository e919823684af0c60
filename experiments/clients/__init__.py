"""Five training scripts as people write them, and the lines by which each becomes qsync's.

Each script is a complete program for torchrun. It prints its loss at every step and saves a checkpoint.

`conversions`    the lines that change, a client at a time
`start`          a client on two ranks, plain or converted
`observed_rank`  one rank of it, watched from outside
"""
