"""What many runs say together, from their folders alone: `python -m seqmix.report outputs/sweeps/NAME`.

runs.py        folder -> Run                     config, overrides, status, last numbers, curves
results.py     runs -> Report of cells           (best learning rate on validation) x seeds -> median and interval
notices.py     Report -> sentences               what the reader must be told beside the numbers
tables.py      Report -> Markdown, CSV
page.py        Report -> one HTML page           page.html, page.css, page.js are written into it
dashboards.py  the same in wandb                 needs the extra `report` (wandb-workspaces), and a key to save
"""
