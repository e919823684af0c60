"""Replay against real steps, and the limits that qsync promises.

`replay_error`      replay against steps of random plans
`limits`            import, capture, replay
`random_plans`      random plans on real ranks, in turns with their profile
"""
