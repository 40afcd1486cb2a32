"""Multiruns that survive: a process a job, a queue, and a folder in which the same command goes on.

names.py   what a run and a sweep are called: hashes of their configs
jobs.py    one job: its process, how it ended, what it leaves
script.py  one job in a process that is forked, rather than started anew
queue.py   the queue; the Hydra launcher in hydra_plugins/ is a thin door to it
table.py   what is shown while it runs, and after
"""
