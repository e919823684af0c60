"""Every claim about GPUs, measured on one within minutes.

`__main__`      run the pieces until the time is up, and report
`pieces`        the pieces, most valuable first
`commands`      run a piece in a process of its own, within seconds
`measured`      what the pieces measure
`report`        tables and bars
"""
