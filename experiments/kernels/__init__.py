"""Kernels and whole steps against their bars and peers.

`compare_kernels`  the experiment
`cases`            single layers, every alternative
`whole_steps`      whole training steps
"""
