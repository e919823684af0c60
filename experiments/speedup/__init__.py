"""Compare samples per second of every way to train on a fast and a weak card.

`__main__`  measured at five shares of the weak rank, and simulated on pairs of GPUs
`report`    rates, promises, tables, the picture
"""
