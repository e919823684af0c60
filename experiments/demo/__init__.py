"""The demo: two unequal ranks train, against every alternative.

`launch`          start the ranks
`rank`            one rank: profile, plan, train, measure
`timed_steps`     the training steps of one run on one rank, timed
`compared_plans`  the plan of every run that the demo compares
`report`          report.json, the table and the files
`publish`         write the figures into README and docs
"""
