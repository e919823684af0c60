"""Solvers of the allocation problem.

`fastest_start`       bring a class to its fastest assignment that fits (QSync's first stage)
`milp`                the exact solver
`precision_recovery`  raise operators while time and memory hold (QSync's second stage)
`replayed_assignments`  all assignments of a class that has few and little memory, for the exact solver
`device_class_model`  one device class's step as a linear program over choices of precision
`memory_lower_bound`  bytes certainly in use at a moment, for that program
`milp_expressions`    sums, binary variables and rows of a program, solved by HiGHS
"""
