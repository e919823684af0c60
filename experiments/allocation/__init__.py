"""Compare plans with those of other methods that choose precisions.

`compare_methods`  the experiment
`bases`            measured models on clusters
`methods`          every method at one target
`methods_report`   its tables
"""
