"""A recipe's table, derived from one run of a model (ours).

watching.py runs it and sees every operator; rules.py and products.py say which dimensions each operator ties,
ties.py and values.py keep count, recorder.py holds what was seen. findings.py reads streams, heads and blocks
off what is tied, tabling.py names the spaces and writes the lines, deriving.py is the verb.
"""
