"""Final accuracy of every way to train on two unequal ranks, paired by seed.

`__main__` run methods, seeds and tasks, and report `tasks` tasks to train `methods` ways of two unequal ranks
to share the work `training` train both ranks' parts in one process, as their job would `report` differences
with their intervals, and the table
"""
