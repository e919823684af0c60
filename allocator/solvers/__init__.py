"""Solvers: the fastest start, recovery, greedy, local search, and the exact one."""
