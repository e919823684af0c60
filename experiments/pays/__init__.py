"""Judge from data sheets whether weaker cards pay, for common cards and models.

`__main__`  the verdicts, and the page about them
"""
