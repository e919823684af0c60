"""Every claim about GPUs, measured on one within minutes.

`__main__` run pieces until the time is up, and report `pieces` the pieces, most valuable first: commands of
other experiments, and tests `commands` run a piece in a process of its own, within seconds `report` tables
and bars
"""
