"""What programs and their child processes need.

`exit_signals`     end on a signal, with child processes and temporary folders
`child_processes`  the environment of a Python process that imports the same modules
`progress`         progress of long work, shown once, on rank 0
"""
