"""Kernels against their bars and peers.

`compare_kernels`  the experiment
`cases`            single layers, every alternative
`host_overhead`    what a node costs beside its arithmetic
"""
