"""Kernels and whole steps against their bars and peers.

`compare_kernels`  the experiment
`cases`            single layers, every alternative
`whole_steps`      whole training steps
`roofline`         the bound by measured peaks
`kernel_picture`   its picture
"""
