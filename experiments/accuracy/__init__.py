"""Final accuracy of every way to train on two unequal ranks, paired by seed.

`__main__`   run methods, seeds and tasks, and report
`tasks`      what is trained
`methods`    how two unequal ranks can share the work
`training`   train both ranks' parts in one process, as their job would
`report`     differences with their intervals, and the table
"""
