"""Multiruns that survive failures: one process per job, a queue, and a folder in which the same command resumes.

names.py     the names of runs and sweeps, which contain hashes of their configs
jobs.py      one job: its process, how it ended, what it leaves behind
script.py    one job in a process that a fork server starts
queue.py     the queue, which the Hydra launcher in hydra_plugins/ starts
table.py     what is shown during a sweep and after it
callback.py  what happens before and after a multirun, with any launcher
"""
