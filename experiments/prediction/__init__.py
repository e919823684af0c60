"""Replay and learned costs against real steps, and the limits that qsync promises.

`replay_error`      replay against steps of random plans
`replay_speed`      seconds of a replay
`learned_costs`     learned costs against baselines
`cost_baselines`    the baselines
`limits`            import, planning, capture, a wrapped step
`validation_ranks`  the ranks that run random plans
"""
