"""Step time against the bandwidth between two hosts, for every way in which gradients travel.

`hosts`   two network namespaces with a paced link between them
`rank`    one rank of a job: every way trains in turns
`report`  bars, table and picture
"""
