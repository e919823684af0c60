"""Detect a device: its class, its capabilities, its state and its timing.

`device_detection`  a rank's device class, and a description of the machine
`cpu_quota`         what a container's quota leaves a process
`amx`               whether a processor multiplies tiles, and their shapes
`gpu_state`         clocks of GPUs, and what holds them down
`kernel_timing`     short timings on CPUs and GPUs
`emulation`         give a rank a share of its core
`pausing`           the process that pauses and resumes a rank
"""
