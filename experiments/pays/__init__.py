"""Does a weaker card pay? Verdicts from data sheets on common piles of cards and common models.

`__main__`  the verdicts, and the page about them
"""
