"""Compares runs, reading only their folders: `python -m seqmix.report outputs/sweeps/NAME`.

runs.py        folder -> Run                     config, overrides, status, last numbers, curves
results.py     runs -> Report of cells           seeds at the best learning rate (on validation) -> median and interval
notices.py     Report -> sentences               what the reader must know beside the numbers
tables.py      Report -> Markdown, CSV
page.py        Report -> one HTML page           page.html, page.css, page.js are written into it
dashboards.py  Report -> wandb                   needs the extra `report` (wandb-workspaces), and a key to save
"""
