"""Shared by all experiments: the run loop, ranks, timing, tables and pictures.

`experiment`         run an experiment: finished pieces, progress, figures.json
`provenance`         machine, versions and commit of a result
`processes`          start ranks by torchrun, or a function in a fresh interpreter
`ranks`              the device, share and job of one rank
`emulation`          give a rank a share of its core
`pausing`            the process that pauses and resumes a rank
`emulated_profiles`  profiles as if a device were slower, or a batch smaller
`pairing`            time variants in turns
`peers`              torch.autocast, Inductor and torchao, to compare with
`measured_peak`      peak memory of one step
`freed_memory`       make glibc keep freed memory
`tables`             rows of text for the terminal and as Markdown
`pictures`           panels, titles and legends
"""
