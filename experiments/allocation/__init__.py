"""Plans against those of other methods that choose precisions.

`compare_methods`  the experiment
`bases`            measured models on clusters
`methods`          every method at one target
`additive`         a program without casts
`balanced`         dynamic batching
`methods_report`   its tables and picture
`planning_times`   seconds of planning large models
`random_checks`    do plans hold? on made-up problems
`random_problems`  the made-up problems
"""
