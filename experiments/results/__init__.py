"""Every experiment behind README and docs, run again, and what the papers promise beside what is found.

commands   which experiments there are, and how each is run
papers     figures that the papers state, beside ours
"""
