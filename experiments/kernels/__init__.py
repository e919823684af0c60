"""Kernels against their bars and peers.

`compare_kernels` the experiment `cases` single layers, every alternative `host_overhead` overhead of a node
beside its arithmetic
"""
