"""Checkpoints that survive kills and full disks, and load on other devices.

contents a checkpoint's index and verification, the checkpoints of a folder; no torch state model and other
objects as JSON with named tensors; random state optimizer_state an optimizer, or several, by names of
parameters writer `save`: stage, write and publish by rename reader `load`: onto any number of ranks periodic
`Checkpoints`: every N steps, asynchronously, the newest K
"""
