"""Samples per second of every way to train on a fast and a weak class, against the fast one alone.

`__main__`  compare them: replayed at five shares and on simulated GPUs, measured at three shares
`ways`      each way as a plan
`ranks`     two real ranks that take turns at all of them
`report`    rates, promises, tables, the picture
"""
