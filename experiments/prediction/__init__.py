"""Measure prediction errors of random plans on real ranks, and the limits that qsync promises.

`limits`            import, capture, replay
`random_plans`      random plans on real ranks, in turns with their profile: of the suite's families
"""
