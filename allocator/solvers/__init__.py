"""Solvers of the allocation problem.

`fastest_start`       bring a class to its fastest assignment that fits (QSync's first stage)
`milp`                the exact solver
`precision_recovery`  raise operators while time and memory hold (QSync's second stage)
`replayed_assignments`  all assignments of a class that has few and little memory, for the exact solver
`linear_lowering`     how one device class's operators run, over choices of precision
`device_class_model`  one device class's step as a linear program over choices of precision
`moments`             the moments of a step at which memory is counted
`memory_lower_bound`  bytes certainly in use at a moment, for that program
`memory_rows`         the program's rows that keep a class within its memory
`milp_expressions`    sums, binary variables and rows of a program, solved by HiGHS
"""
