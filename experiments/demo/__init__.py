"""The demo: two unequal ranks train, against every alternative.

`launch`   start the ranks
`rank`     one rank: profile, plan, train, measure
`runner`   the steps of one run on one rank
`runs`     the runs as plans
`report`   report.json, the table and the files
`picture`  step times, predicted and measured
`publish`  write the figures into README and docs
"""
